//! REPLs: sandboxes whose interpreter state matters. One row each, deleted with its sandbox.

use bathy_spec::name;

use super::record::{signed, unsigned};
use super::{Store, StoreError};

const COLUMNS: &str = "name, sandbox, language, context, created_ns, cells, last_used_ns, boot";

/// The record of a REPL. Times are nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplRow {
    pub name: String,
    pub sandbox: String,
    pub language: String,
    /// The context in the sandbox.
    pub context: String,
    pub created_ns: u64,
    /// How many cells have run in it.
    pub cells: u64,
    /// When its last cell ended.
    pub last_used_ns: Option<u64>,
    /// The host's boot id at that time.
    pub boot: Option<String>,
}

impl Store {
    /// Inserts a new REPL for an existing sandbox.
    pub(crate) fn insert_repl(&mut self, new: &ReplRow) -> Result<(), StoreError> {
        name::check(&new.name)?;
        let change = self.durable_change()?;
        if change.number("SELECT count(*) FROM repls WHERE name = ?", [&new.name])? > 0 {
            return Err(StoreError::NameTaken { name: new.name.clone() });
        }
        // Selected from the sandbox's own row: a sandbox that was removed meanwhile has no REPL.
        let inserted = change.run(
            "INSERT INTO repls (name, sandbox, language, context, created_ns)
                SELECT ?, id, ?, ?, ? FROM sandboxes WHERE id = ?",
            (&new.name, &new.language, &new.context, signed(new.created_ns), &new.sandbox),
        )?;
        if inserted == 0 {
            return Err(StoreError::Removed(new.sandbox.clone()));
        }
        change.finish()
    }

    /// Finds a REPL by its name, its sandbox's id or the beginning of that id.
    pub fn find_repl(&self, wanted: &str) -> Result<ReplRow, StoreError> {
        let one = |column: &str, value: &str| {
            let query = format!("SELECT {COLUMNS} FROM repls WHERE {column} = ?");
            Ok::<_, StoreError>(self.repl_rows(&query, [value])?.pop())
        };
        if let Some(found) = one("name", wanted)? {
            return Ok(found);
        }
        match self.find(wanted) {
            Ok(sandbox) => one("sandbox", &sandbox.id)?.ok_or_else(|| StoreError::NoRepl {
                wanted: sandbox.display_name().to_owned(),
                hint: ": that is a sandbox without one. `bathy repl new` makes one".to_owned(),
            }),
            Err(StoreError::Name(name::NameError::Unknown { wanted: shown, .. })) => {
                let known = self.repls()?;
                let near = name::nearest(wanted, known.iter().map(|repl| repl.name.as_str()));
                let hint = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
                Err(StoreError::NoRepl { wanted: shown, hint })
            }
            Err(error) => Err(error),
        }
    }

    /// The REPL of the sandbox with this id.
    pub(crate) fn repl_of(&self, sandbox: &str) -> Result<Option<ReplRow>, StoreError> {
        Ok(self.repl_rows(&format!("SELECT {COLUMNS} FROM repls WHERE sandbox = ?"), [sandbox])?.pop())
    }

    /// All REPLs, the oldest first.
    pub fn repls(&self) -> Result<Vec<ReplRow>, StoreError> {
        self.repl_rows(&format!("SELECT {COLUMNS} FROM repls ORDER BY created_ns, name"), ())
    }

    /// Records that a cell ended in a REPL at this time, in this boot of the host. False if the REPL was
    /// removed.
    pub fn use_repl(&mut self, name: &str, at_ns: u64, boot: &str) -> Result<bool, StoreError> {
        let change = self.change()?;
        let used = change.run(
            "UPDATE repls SET cells = cells + 1, last_used_ns = ?, boot = ? WHERE name = ?",
            (signed(at_ns), boot, name),
        )?;
        change.finish()?;
        Ok(used > 0)
    }

    fn repl_rows(&self, query: &str, values: impl rusqlite::Params) -> Result<Vec<ReplRow>, StoreError> {
        self.query(query, values, |row| {
            Ok(ReplRow {
                name: row.get(0)?,
                sandbox: row.get(1)?,
                language: row.get(2)?,
                context: row.get(3)?,
                created_ns: unsigned(row.get(4)?),
                cells: unsigned(row.get(5)?),
                last_used_ns: row.get::<_, Option<i64>>(6)?.map(unsigned),
                boot: row.get(7)?,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use bathy_spec::{Choice, Chosen, SandboxSpec};

    use super::*;
    use crate::store::NewRecord;

    const ONE: &str = "abcdefghijkl";
    const TWO: &str = "abcdzzzzzzzz";

    fn store_with(sandboxes: &[(&str, Option<&str>)]) -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(folder.path()).unwrap();
        for (id, name) in sandboxes {
            let name = name.map(str::to_owned);
            let engine = Choice { engine: Chosen::Uml, reason: "asked for".to_owned() };
            let (id, spec) = ((*id).to_owned(), SandboxSpec::default());
            let new = NewRecord { id, name, spec, engine, created_ns: 1 };
            store.insert(&new).unwrap();
        }
        (folder, store)
    }

    fn repl(name: &str, sandbox: &str) -> ReplRow {
        ReplRow {
            name: name.to_owned(),
            sandbox: sandbox.to_owned(),
            language: "python".to_owned(),
            context: "python".to_owned(),
            created_ns: 7,
            cells: 0,
            last_used_ns: None,
            boot: None,
        }
    }

    #[test]
    fn a_repl_is_found_by_its_name_and_its_sandboxs_id() {
        let (_folder, mut store) = store_with(&[(ONE, Some("mine")), (TWO, Some("plain"))]);
        store.insert_repl(&repl("mine", ONE)).unwrap();
        for wanted in ["mine", ONE, "abcde"] {
            assert_eq!(store.find_repl(wanted).unwrap(), repl("mine", ONE), "{wanted}");
        }
        let missing = |wanted: &str| store.find_repl(wanted).unwrap_err().to_string();
        assert_eq!(missing("mime"), "There is no REPL `mime`; did you mean `mine`?");
        assert!(missing("plain").contains("is a sandbox without one"), "{}", missing("plain"));
        assert!(missing("abcd").contains("could be any of"), "{}", missing("abcd"));
        assert!(!missing("\u{1b}[2J").contains('\u{1b}'));
    }

    #[test]
    fn a_name_belongs_to_one_repl_and_a_sandbox_has_one() {
        let (_folder, mut store) = store_with(&[(ONE, None), (TWO, None)]);
        store.insert_repl(&repl("mine", ONE)).unwrap();
        let taken = store.insert_repl(&repl("mine", TWO)).unwrap_err();
        assert!(matches!(taken, StoreError::NameTaken { name } if name == "mine"));
        assert!(store.insert_repl(&repl("other", ONE)).is_err(), "a sandbox has one REPL");
        assert!(matches!(store.insert_repl(&repl("x", "nosuchsandbo")), Err(StoreError::Removed(_))));
        assert!(matches!(store.insert_repl(&repl("../x", TWO)), Err(StoreError::Name(_))));
        assert_eq!(store.repls().unwrap().len(), 1);
    }

    #[test]
    fn cells_are_counted_and_a_repl_goes_with_its_sandbox() {
        let (_folder, mut store) = store_with(&[(ONE, None)]);
        store.insert_repl(&repl("mine", ONE)).unwrap();
        assert!(store.use_repl("mine", 9, "boot-1").unwrap());
        assert!(store.use_repl("mine", 11, "boot-2").unwrap());
        let used = store.find_repl("mine").unwrap();
        assert_eq!((used.cells, used.last_used_ns, used.boot.as_deref()), (2, Some(11), Some("boot-2")));
        assert!(store.delete(ONE).unwrap());
        assert_eq!(store.repls().unwrap(), []);
        assert!(!store.use_repl("mine", 12, "boot-2").unwrap());
        assert!(matches!(store.find_repl("mine"), Err(StoreError::NoRepl { .. })));
    }
}

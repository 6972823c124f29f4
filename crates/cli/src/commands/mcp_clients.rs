//! The clients that `bathy mcp install` supports: where each stores its servers, and in which format.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use toml_edit::{Array, DocumentMut, Item, Table, TableLike, value};

use crate::jsonc::Document;

/// A program that uses MCP servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Client {
    /// Claude Desktop.
    ClaudeDesktop,
    /// Claude Code.
    ClaudeCode,
    /// Cursor.
    Cursor,
    /// Visual Studio Code.
    #[value(name = "vscode")]
    VsCode,
    /// Windsurf.
    Windsurf,
    /// Codex.
    Codex,
    /// Zed.
    Zed,
}

/// Where a server is available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Scope {
    /// All projects of this user.
    #[default]
    User,
    /// The project in the current folder.
    Project,
}

impl fmt::Display for Client {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::ClaudeDesktop => "Claude Desktop",
            Self::ClaudeCode => "Claude Code",
            Self::Cursor => "Cursor",
            Self::VsCode => "VS Code",
            Self::Windsurf => "Windsurf",
            Self::Codex => "Codex",
            Self::Zed => "Zed",
        })
    }
}

/// The folders that contain the clients' files.
#[derive(Clone, Debug)]
pub struct Places {
    /// The user's home folder.
    pub home: PathBuf,
    /// `XDG_CONFIG_HOME`, or its default.
    pub config: PathBuf,
    pub project: PathBuf,
    /// `CODEX_HOME`, if it is set.
    pub codex: Option<PathBuf>,
    /// `CLAUDE_CONFIG_DIR`, if it is set.
    pub claude: Option<PathBuf>,
    /// Whether this is macOS.
    pub mac: bool,
}

impl Places {
    pub fn of_user() -> Result<Self, String> {
        let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let home =
            folder("HOME").ok_or("HOME is not set to an absolute path, so there is no place for settings")?;
        let project =
            std::env::current_dir().map_err(|error| format!("There is no current folder: {error}"))?;
        Ok(Self {
            config: folder("XDG_CONFIG_HOME").unwrap_or_else(|| home.join(".config")),
            home,
            project,
            codex: folder("CODEX_HOME"),
            claude: folder("CLAUDE_CONFIG_DIR"),
            mac: cfg!(target_os = "macos"),
        })
    }

    /// Where desktop programs store their settings.
    fn applications(&self) -> PathBuf {
        if self.mac { self.home.join("Library/Application Support") } else { self.config.clone() }
    }
}

/// A server, as it is described to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its name in the client's settings.
    pub name: String,
    pub command: String,
    pub args: Vec<String>,
}

/// How a client's file has to change.
#[derive(Debug, PartialEq, Eq)]
pub enum Change {
    /// Not at all: it has the server already, with these settings besides.
    Same(Vec<String>),
    /// It has another server of this name.
    Other {
        /// Its entry.
        entry: String,
        /// The settings that differ from the server's.
        differs: Vec<String>,
    },
    /// It gets this text.
    Write(String),
}

impl Client {
    /// The file with its servers.
    pub fn file(self, scope: Scope, places: &Places) -> Result<PathBuf, String> {
        let project = |path: &str| Ok(places.project.join(path));
        match (self, scope) {
            (Self::ClaudeDesktop, Scope::User) => {
                Ok(places.applications().join("Claude/claude_desktop_config.json"))
            }
            (Self::ClaudeCode, Scope::User) => {
                Ok(places.claude.as_ref().unwrap_or(&places.home).join(".claude.json"))
            }
            (Self::ClaudeCode, Scope::Project) => project(".mcp.json"),
            (Self::Cursor, Scope::User) => Ok(places.home.join(".cursor/mcp.json")),
            (Self::Cursor, Scope::Project) => project(".cursor/mcp.json"),
            (Self::VsCode, Scope::User) => Ok(places.applications().join("Code/User/mcp.json")),
            (Self::VsCode, Scope::Project) => project(".vscode/mcp.json"),
            (Self::Windsurf, Scope::User) => Ok(places.home.join(".codeium/windsurf/mcp_config.json")),
            (Self::Codex, Scope::User) => {
                let folder = places.codex.clone().unwrap_or_else(|| places.home.join(".codex"));
                Ok(folder.join("config.toml"))
            }
            (Self::Codex, Scope::Project) => project(".codex/config.toml"),
            // Also on macOS.
            (Self::Zed, Scope::User) if places.mac => Ok(places.home.join(".config/zed/settings.json")),
            (Self::Zed, Scope::User) => Ok(places.config.join("zed/settings.json")),
            (Self::Zed, Scope::Project) => project(".zed/settings.json"),
            (Self::ClaudeDesktop | Self::Windsurf, Scope::Project) => {
                Err(format!("{self} has no settings of a project. Leave --scope out"))
            }
        }
    }

    /// The key of the object with the servers by name.
    fn section(self) -> &'static str {
        match self {
            Self::VsCode => "servers",
            Self::Codex => "mcp_servers",
            Self::Zed => "context_servers",
            _ => "mcpServers",
        }
    }

    /// Whether its JSON may have comments.
    fn comments(self) -> bool {
        matches!(self, Self::Cursor | Self::VsCode | Self::Windsurf | Self::Zed)
    }

    fn entry(self, server: &Server) -> Vec<(&'static str, Value)> {
        let mut entry = vec![("command", json!(server.command)), ("args", json!(server.args))];
        if matches!(self, Self::ClaudeCode | Self::VsCode) {
            entry.insert(0, ("type", json!("stdio")));
        }
        entry
    }

    /// The text of a file with this server only.
    pub fn example(self, server: &Server) -> Result<String, String> {
        match self.change("", server, Scope::User, false)? {
            Change::Write(text) => Ok(text),
            Change::Same(_) | Change::Other { .. } => Ok(String::new()),
        }
    }

    /// How a file with this text has to change. `force` replaces another server.
    pub fn change(self, text: &str, server: &Server, scope: Scope, force: bool) -> Result<Change, String> {
        let found = |old: &Value, entry: &dyn Fn() -> String| match compare(&self.entry(server), old, scope) {
            Ok(others) => Change::Same(others),
            Err(differs) => Change::Other { entry: entry(), differs },
        };
        let changed = if self == Self::Codex {
            let mut document = parse_toml(text)?;
            let servers = toml_servers(&mut document, self.section())?;
            if let Some(old) = servers.get(&server.name).filter(|_| !force) {
                return Ok(found(&toml_entry(old), &|| old.to_string().trim().to_owned()));
            }
            let mut table = Table::new();
            table.insert("command", value(&server.command));
            table.insert("args", value(server.args.iter().collect::<Array>()));
            servers.insert(&server.name, Item::Table(table));
            document.to_string()
        } else {
            let document = Document::parse(text, self.comments()).map_err(|error| error.to_string())?;
            let old = if force { Ok(None) } else { document.get(self.section(), &server.name) };
            if let Some(old) = old.map_err(|error| error.to_string())? {
                return Ok(found(old, &|| old.to_string()));
            }
            let set = document.set(self.section(), &server.name, &self.entry(server));
            set.map_err(|error| error.to_string())?
        };
        // Nothing is written if it was this entry that `force` replaced.
        Ok(if changed == text { Change::Same(Vec::new()) } else { Change::Write(changed) })
    }

    /// What a user has to do to see the server.
    pub fn advice(self, scope: Scope) -> &'static str {
        match (self, scope) {
            (Self::ClaudeDesktop, _) => "Restart Claude Desktop to use it",
            (Self::ClaudeCode, Scope::User) => "New sessions of Claude Code have it; /mcp shows it",
            (Self::ClaudeCode, Scope::Project) => "Claude Code asks before it uses the servers of a project",
            (Self::Cursor, _) => "Restart Cursor, or switch it on under Settings, Tools & MCP",
            (Self::VsCode, _) => "VS Code offers to start it; the command `MCP: List Servers` shows it",
            (Self::Windsurf, _) => "Refresh the MCP servers in Windsurf's settings to use it",
            (Self::Codex, Scope::User) => "New sessions of Codex have it; /mcp shows it",
            (Self::Codex, Scope::Project) => "Codex reads it in projects that it trusts",
            (Self::Zed, _) => "Zed starts it at once; its agent panel shows it",
        }
    }
}

/// Compares a file's entry with ours. Returns its other settings if it is the same server, else the settings that differ.
fn compare(entry: &[(&str, Value)], old: &Value, scope: Scope) -> Result<Vec<String>, Vec<String>> {
    let is_different = |key: &str, value: &Value| match old.get(key) {
        Some(found) => found != value,
        // A user's entry with a command needs no type.
        None => scope == Scope::Project || key != "type",
    };
    let mut differs: Vec<String> = entry
        .iter()
        .filter(|(key, value)| is_different(key, value))
        .map(|(key, _)| (*key).to_owned())
        .collect();
    let is_ours = |key: &String| entry.iter().any(|(name, _)| name == key);
    let keys = old.as_object().into_iter().flat_map(serde_json::Map::keys);
    let mut others: Vec<String> = keys.filter(|key| !is_ours(key)).cloned().collect();
    // A project's file is as untrusted as its code: a variable or an address makes another server of the same command.
    if scope == Scope::Project {
        differs.append(&mut others);
    }
    if differs.is_empty() { Ok(others) } else { Err(differs) }
}

fn parse_toml(text: &str) -> Result<DocumentMut, String> {
    text.parse().map_err(|error: toml_edit::TomlError| toml_place(text, &error))
}

fn toml_servers<'a>(document: &'a mut DocumentMut, section: &str) -> Result<&'a mut dyn TableLike, String> {
    let mut implicit = Table::new();
    implicit.set_implicit(true);
    let found = document.entry(section).or_insert(Item::Table(implicit));
    let kind = found.type_name();
    found.as_table_like_mut().ok_or_else(|| format!("{section:?} is not a table but a {kind}"))
}

/// An entry as JSON. What is neither text nor a list of text is null there, which is no setting of ours.
fn toml_entry(item: &Item) -> Value {
    let text = |text: Option<&str>| text.map_or(Value::Null, |text| json!(text));
    let setting = |item: &Item| match item.as_array() {
        Some(list) => list.iter().map(|value| text(value.as_str())).collect(),
        None => text(item.as_str()),
    };
    let Some(table) = item.as_table_like() else { return Value::Null };
    Value::Object(table.iter().map(|(key, item)| (key.to_owned(), setting(item))).collect())
}

fn toml_place(text: &str, error: &toml_edit::TomlError) -> String {
    let at = error.span().map_or(0, |span| span.start);
    let before = text.get(..at).unwrap_or_default();
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    format!("line {}, column {column}: {}", before.matches('\n').count() + 1, error.message())
}

/// The program that a client starts: the wrapper script if this program was built in its checkout, which also builds what is
/// missing, else this program itself.
pub fn program(running: &Path) -> PathBuf {
    let built_in = running.ancestors().find(|folder| folder.file_name().is_some_and(|name| name == "target"));
    let wrapper =
        built_in.and_then(Path::parent).map(|sources| (sources.join("bathy"), sources.join("setup.sh")));
    match wrapper {
        Some((wrapper, setup)) if wrapper.is_file() && setup.is_file() => wrapper,
        _ => running.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    fn places(mac: bool) -> Places {
        Places {
            home: "/home/u".into(),
            config: "/home/u/.config".into(),
            project: "/p".into(),
            codex: None,
            claude: None,
            mac,
        }
    }

    fn server() -> Server {
        Server { name: "bathysphere".into(), command: "/opt/bathy".into(), args: vec!["mcp".into()] }
    }

    #[test]
    fn every_client_has_its_file() {
        let file = |client: Client, scope, mac| {
            client.file(scope, &places(mac)).map(|path| path.display().to_string())
        };
        for (client, linux, mac) in [
            (
                Client::ClaudeDesktop,
                ".config/Claude/claude_desktop_config.json",
                "Library/Application Support/Claude/claude_desktop_config.json",
            ),
            (Client::ClaudeCode, ".claude.json", ".claude.json"),
            (Client::Cursor, ".cursor/mcp.json", ".cursor/mcp.json"),
            (Client::VsCode, ".config/Code/User/mcp.json", "Library/Application Support/Code/User/mcp.json"),
            (Client::Windsurf, ".codeium/windsurf/mcp_config.json", ".codeium/windsurf/mcp_config.json"),
            (Client::Codex, ".codex/config.toml", ".codex/config.toml"),
            (Client::Zed, ".config/zed/settings.json", ".config/zed/settings.json"),
        ] {
            assert_eq!(file(client, Scope::User, false), Ok(format!("/home/u/{linux}")));
            assert_eq!(file(client, Scope::User, true), Ok(format!("/home/u/{mac}")));
        }
        assert_eq!(file(Client::ClaudeCode, Scope::Project, false), Ok("/p/.mcp.json".to_owned()));
        assert!(file(Client::Windsurf, Scope::Project, false).unwrap_err().contains("--scope"));
        let moved = Places { codex: Some("/c".into()), ..places(false) };
        assert_eq!(Client::Codex.file(Scope::User, &moved), Ok("/c/config.toml".into()));
    }

    #[test]
    fn every_client_is_told_once_and_knows_it_then() {
        for client in Client::value_variants() {
            let Ok(Change::Write(text)) = client.change("", &server(), Scope::User, false) else {
                panic!("{client}")
            };
            assert!(text.contains(client.section()) && text.contains("\"/opt/bathy\""), "{text}");
            assert_eq!(
                client.change(&text, &server(), Scope::User, false),
                Ok(Change::Same(Vec::new())),
                "{client}"
            );
            let moved = Server { command: "/usr/bin/bathy".into(), ..server() };
            assert!(
                matches!(client.change(&text, &moved, Scope::User, false), Ok(Change::Other { .. })),
                "{client}"
            );
            let Ok(Change::Write(text)) = client.change(&text, &moved, Scope::User, true) else {
                panic!("{client}")
            };
            assert!(text.contains("/usr/bin/bathy") && !text.contains("/opt/bathy"), "{text}");
        }
    }

    /// What answers for a file: the settings that differ in a project, and those besides in the user's own file.
    fn judged(client: Client, text: &str) -> [Vec<String>; 2] {
        let Ok(Change::Other { differs, .. }) = client.change(text, &server(), Scope::Project, false) else {
            panic!("{client} takes it for the same: {text}")
        };
        let Ok(Change::Write(forced)) = client.change(text, &server(), Scope::Project, true) else {
            panic!("{client}: {text}")
        };
        assert!(!forced.contains("evil"), "{forced}");
        let again = client.change(&forced, &server(), Scope::Project, false);
        assert_eq!(again, Ok(Change::Same(Vec::new())), "{forced}");
        match client.change(text, &server(), Scope::User, false).unwrap() {
            Change::Same(others) => [differs, others],
            other => [differs, vec![format!("{other:?}")]],
        }
    }

    #[test]
    fn a_projects_entry_with_other_settings_is_another_server() {
        let json = |settings: &str| {
            format!(
                r#"{{"mcpServers": {{"bathysphere": {{"command": "/opt/bathy", "args": ["mcp"]{settings}}}}}}}"#
            )
        };
        for client in [Client::ClaudeCode, Client::Cursor] {
            for (settings, keys) in [
                (r#", "type": "stdio", "env": {"LD_PRELOAD": "./evil.so"}"#, &["env"][..]),
                (
                    r#", "type": "stdio", "cwd": "evil", "url": "http://evil.example/"}"#
                        .trim_end_matches('}'),
                    &["cwd", "url"],
                ),
            ] {
                let [mut differs, mut others] = judged(client, &json(settings));
                differs.retain(|key| key != "type");
                others.retain(|key| key != "type");
                assert_eq!(
                    (differs, others),
                    (
                        keys.iter().map(|key| (*key).to_owned()).collect(),
                        keys.iter().map(|key| (*key).to_owned()).collect()
                    ),
                    "{client}"
                );
            }
        }
        let [differs, other] =
            judged(Client::ClaudeCode, &json(r#", "type": "http", "url": "http://evil.example/""#));
        assert_eq!(differs, ["type", "url"]);
        assert!(other[0].contains("Other"), "{other:?}");
        let twice = r#"{"mcpServers": {"bathysphere": {"command": "evil", "command": "/opt/bathy", "args": ["mcp"]}}}"#;
        let error = Client::Cursor.change(twice, &server(), Scope::Project, false).unwrap_err();
        assert!(error.contains("occurs twice"), "{error}");
    }

    #[test]
    fn a_projects_table_with_other_settings_is_another_server() {
        let entry = "[mcp_servers.bathysphere]\ncommand = \"/opt/bathy\"\nargs = [\"mcp\"]\n";
        let env = format!("{entry}[mcp_servers.bathysphere.env]\nLD_PRELOAD = \"./evil.so\"\n");
        assert_eq!(judged(Client::Codex, &env), [["env"], ["env"]]);
        let url = format!("{entry}url = \"http://evil.example/\"\n");
        assert_eq!(judged(Client::Codex, &url), [["url"], ["url"]]);
        let number = entry.replace("[\"mcp\"]", "[\"mcp\", 7]");
        let [differs, other] = judged(Client::Codex, &number);
        assert_eq!(differs, ["args"]);
        assert!(other[0].contains("Other"), "{other:?}");
    }

    #[test]
    fn codex_keeps_comments_and_order() {
        let text =
            "# mine\nmodel = \"x\"  # note\n\n[mcp_servers.other]\ncommand = \"o\" # why\n\n[z]\na = 1\n";
        let Ok(Change::Write(changed)) = Client::Codex.change(text, &server(), Scope::User, false) else {
            panic!()
        };
        for line in text.lines() {
            assert!(changed.contains(line), "{line} is gone from\n{changed}");
        }
        assert!(
            changed.contains("[mcp_servers.bathysphere]\ncommand = \"/opt/bathy\"\nargs = [\"mcp\"]\n"),
            "{changed}"
        );
        let inline = "mcp_servers = { other = { command = \"o\" } }\n";
        let Ok(Change::Write(changed)) = Client::Codex.change(inline, &server(), Scope::User, false) else {
            panic!()
        };
        assert_eq!(
            Client::Codex.change(&changed, &server(), Scope::User, false),
            Ok(Change::Same(Vec::new())),
            "{changed}"
        );
        assert!(changed.contains("other"), "{changed}");
    }

    #[test]
    fn broken_files_are_told_with_their_place() {
        assert!(
            Client::Codex
                .change("a = 1\nb = = 2\n", &server(), Scope::User, true)
                .unwrap_err()
                .starts_with("line 2, column 5")
        );
        assert!(
            Client::Codex
                .change("mcp_servers = 3\n", &server(), Scope::User, true)
                .unwrap_err()
                .contains("not a table")
        );
        assert!(
            Client::Cursor
                .change("{\n\"a\" 1}", &server(), Scope::User, true)
                .unwrap_err()
                .starts_with("line 2")
        );
        assert!(
            Client::ClaudeCode
                .change("{} // x", &server(), Scope::User, true)
                .unwrap_err()
                .contains("comment")
        );
    }

    #[test]
    fn a_build_of_sources_is_started_through_its_wrapper() {
        let folder = tempfile::tempdir().unwrap();
        let built = folder.path().join("target/x86_64/release/bathy");
        assert_eq!(program(&built), built);
        std::fs::write(folder.path().join("bathy"), "").unwrap();
        std::fs::write(folder.path().join("setup.sh"), "").unwrap();
        assert_eq!(program(&built), folder.path().join("bathy"));
        assert_eq!(program(Path::new("/usr/bin/bathy")), Path::new("/usr/bin/bathy"));
    }
}

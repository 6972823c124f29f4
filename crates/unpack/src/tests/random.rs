//! Random layers, against a model that unpacks them one entry after the other.

use std::collections::BTreeMap;

use super::archive::{Archive, Header};
use super::image;

/// Xorshift: the tests are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn name(&mut self) -> String {
        // Few, so that they meet each other; some of them long, so that directories have several blocks.
        match self.below(12) {
            number @ 0..6 => ["a", "b", "c", "-", "a.b", "ab"][usize::try_from(number).unwrap()].into(),
            number => char::from(b'd' + u8::try_from(number).unwrap()).to_string().repeat(90),
        }
    }

    fn path(&mut self) -> Vec<String> {
        (0..=self.below(3)).map(|_| self.name()).collect()
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Modelled {
    /// Its mode, and the layer that has it from an entry.
    Directory(u32, usize),
    /// The number of its content, which its other names have too.
    File(usize),
}

/// What was unpacked so far, by path, and which layer put it there.
#[derive(Clone, Default)]
struct Model {
    files: BTreeMap<Vec<String>, (Modelled, usize)>,
    contents: Vec<Vec<u8>>,
}

impl Model {
    fn remove(&mut self, path: &[String], below: usize, itself: bool) {
        self.files.retain(|name, (what, layer)| {
            let hidden = name.starts_with(path) && (itself || name.len() > path.len());
            if let Modelled::Directory(mode, by) = what
                && hidden
                && *by < below
            {
                // What is hidden gives nothing to what takes its place.
                (*mode, *by) = (0o755, below);
            }
            !hidden || *layer >= below
        });
    }

    /// Whether an entry of `layer` may be at `path`: no parent is something else than a directory by the same layer.
    fn accepts(&self, path: &[String], layer: usize) -> bool {
        (1..path.len()).all(|length| {
            !matches!(self.files.get(&path[..length]), Some((Modelled::File(_), by)) if *by == layer)
        })
    }

    fn make_parents(&mut self, path: &[String], layer: usize) {
        for length in 1..path.len() {
            let parent = &path[..length];
            match self.files.get_mut(parent) {
                Some((Modelled::Directory(..), by)) => *by = layer,
                _ => {
                    self.remove(parent, usize::MAX, true);
                    self.files.insert(parent.to_vec(), (Modelled::Directory(0o755, layer), layer));
                }
            }
        }
    }

    fn put(&mut self, path: &[String], what: Modelled, layer: usize) {
        self.make_parents(path, layer);
        let merged = matches!(
            (&what, self.files.get(path)),
            (Modelled::Directory(..), Some((Modelled::Directory(..), _)))
        );
        if !merged {
            self.remove(path, usize::MAX, true);
        }
        self.files.insert(path.to_vec(), (what, layer));
    }
}

/// One random entry, in the archive and in the model.
fn add(archive: Archive, model: &mut Model, random: &mut Random, layer: usize) -> Archive {
    let path = random.path();
    if !model.accepts(&path, layer) {
        return archive;
    }
    let joined = path.join("/");
    let (name, parents) = path.split_last().unwrap();
    match random.below(10) {
        0..4 => {
            let content = vec![b'x'; usize::try_from(random.below(3) * 700 + random.below(9)).unwrap()];
            let content = [format!("{}", model.contents.len()).as_bytes(), &content].concat();
            model.contents.push(content.clone());
            model.put(&path, Modelled::File(model.contents.len() - 1), layer);
            archive.file(joined, content)
        }
        4..6 => {
            let mode = 0o700 + u32::try_from(random.below(64)).unwrap();
            model.put(&path, Modelled::Directory(mode, layer), layer);
            archive.header(&Header { mode, ..Header::new(joined, b'5') })
        }
        6 | 7 => {
            // A file of this layer: which others there are depends on what the layer hides.
            let target =
                model.files.iter().find(|(_, (what, by))| *by == layer && matches!(what, Modelled::File(_)));
            let Some((target, (what, _))) = target.map(|(target, found)| (target.clone(), found.clone()))
            else {
                return archive;
            };
            if target.starts_with(&path) {
                return archive;
            }
            model.put(&path, what, layer);
            archive.link(joined, target.join("/"))
        }
        8 => {
            model.make_parents(&path, layer);
            model.remove(&path, layer, true);
            archive.file([parents, &[format!(".wh.{name}")]].concat().join("/"), "")
        }
        _ => {
            let within = [path.as_slice(), &[String::new()]].concat();
            if !model.accepts(&within, layer) {
                return archive;
            }
            model.make_parents(&within, layer);
            model.remove(&path, layer, false);
            archive.file(format!("{joined}/.wh..wh..opq"), "")
        }
    }
}

#[test]
fn random_layers_are_what_the_model_says() {
    for seed in 1..250_u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut model = Model::default();
        let layers = 1 + usize::try_from(random.below(4)).unwrap();
        let archives: Vec<Archive> = (0..layers)
            .map(|layer| {
                let entries = random.below(25);
                (0..entries).fold(Archive::new(), |archive, _| add(archive, &mut model, &mut random, layer))
            })
            .collect();
        let mut found = image(&archives.iter().collect::<Vec<_>>());
        found.remove("");
        let wanted: Vec<_> = model.files.keys().map(|path| path.join("/")).collect();
        let mut wanted_sorted = wanted.clone();
        wanted_sorted.sort();
        assert_eq!(found.keys().cloned().collect::<Vec<_>>(), wanted_sorted, "seed {seed}");
        for (path, (what, _)) in &model.files {
            let file = &found[&path.join("/")];
            match what {
                Modelled::Directory(mode, _) => {
                    assert_eq!(u32::from(file.mode), 0o040_000 | mode, "{path:?}, {seed}")
                }
                Modelled::File(content) => {
                    assert_eq!(file.data, model.contents[*content], "{path:?}, seed {seed}");
                    let names = model.files.values().filter(|(other, _)| other == what).count();
                    assert_eq!(usize::try_from(file.links).unwrap(), names, "{path:?}, seed {seed}");
                }
            }
        }
    }
}

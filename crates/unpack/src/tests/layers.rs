//! What upper layers do to lower ones.

use super::archive::{Archive, Header};
use super::{disk_of, image, unpack};
use crate::{IndexError, IndexLayer, Layout, write_index};

fn paths(archives: &[&Archive]) -> Vec<String> {
    image(archives).into_keys().filter(|path| !path.is_empty()).collect()
}

#[test]
fn a_whiteout_hides_what_is_below() {
    let lower = Archive::new().file("a/x", "").file("a/y", "").file("b", "");
    assert_eq!(paths(&[&lower, &Archive::new().file("a/.wh.x", "")]), ["a", "a/y", "b"]);
    assert_eq!(paths(&[&lower, &Archive::new().file(".wh.a", "")]), ["b"]);
    assert_eq!(paths(&[&lower, &Archive::new().file(".wh.missing", "")]), ["a", "a/x", "a/y", "b"]);
    // Any type is a whiteout.
    assert_eq!(paths(&[&lower, &Archive::new().directory(".wh.a/")]), ["b"]);
    assert_eq!(paths(&[&lower, &Archive::new().header(&Header::new(".wh.a", b'3'))]), ["b"]);
}

#[test]
fn a_whiteout_hides_nothing_of_its_own_layer() {
    let lower = Archive::new().file("a/x", "lower").file("b", "lower");
    for upper in [
        Archive::new().file(".wh.a", "").file("a/y", "").file(".wh.b", "").file("b", "upper"),
        Archive::new().file("a/y", "").file(".wh.a", "").file("b", "upper").file(".wh.b", ""),
    ] {
        let found = image(&[&lower, &upper]);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["", "a", "a/y", "b"]);
        assert_eq!(found["b"].data, b"upper");
    }
}

#[test]
fn an_opaque_directory_hides_what_is_in_it() {
    let lower =
        Archive::new().header(&Header { mode: 0o700, uid: 7, ..Header::new("a", b'5') }).file("a/x", "");
    for upper in [
        Archive::new().file("a/.wh..wh..opq", "").file("a/y", ""),
        Archive::new().file("a/y", "").file("a/.wh..wh..opq", ""),
    ] {
        let found = image(&[&lower, &upper]);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["", "a", "a/y"]);
        assert_eq!((found["a"].mode, found["a"].uid), (0o040_700, 7), "the directory itself stays");
    }
    let root = Archive::new().file(".wh..wh..opq", "").file("b", "");
    assert_eq!(paths(&[&lower, &root]), ["b"]);
    assert_eq!(paths(&[&lower, &root, &lower]), ["a", "a/x", "b"]);
}

#[test]
fn a_directory_takes_the_metadata_of_the_uppermost_entry() {
    let of = |mode, uid| Header { mode, uid, ..Header::new("a", b'5') };
    let lower = Archive::new().header(&of(0o700, 1)).file("a/x", "");
    let found = image(&[&lower, &Archive::new().file("a/y", "")]);
    assert_eq!((found["a"].mode, found["a"].uid), (0o040_700, 1), "without an entry it keeps what it has");
    let found = image(&[&lower, &Archive::new().file("a/y", "").header(&of(0o750, 2)), &Archive::new()]);
    assert_eq!((found["a"].mode, found["a"].uid), (0o040_750, 2));
    assert!(found.contains_key("a/x") && found.contains_key("a/y"));
    let root = image(&[&lower, &Archive::new().header(&Header { mode: 0o711, ..Header::new("./", b'5') })]);
    assert_eq!(root[""].mode, 0o040_711);
}

#[test]
fn files_and_directories_replace_each_other() {
    let directory = Archive::new().file("a/x", "");
    let file = Archive::new().file("a", "file");
    assert_eq!(paths(&[&directory, &file]), ["a"]);
    assert_eq!(paths(&[&file, &directory]), ["a", "a/x"]);
    assert_eq!(paths(&[&directory, &file, &Archive::new().directory("a")]), ["a"]);
    // In one layer, the last entry counts, and a directory in the place of a file has nothing of lower layers.
    let both = Archive::new().file("a", "file").directory("a").file("a/y", "");
    assert_eq!(paths(&[&directory, &both]), ["a", "a/y"]);
    assert_eq!(paths(&[&Archive::new().file("a/y", "").file("a", "file")]), ["a"]);
    let twice = image(&[&Archive::new().file("a", "first").file("a", "second")]);
    assert_eq!((twice["a"].data.as_slice(), twice["a"].links), (b"second".as_slice(), 1));
}

#[test]
fn a_file_hides_the_directory_whose_names_have_whiteouts() {
    let lower = Archive::new().file("a/x", "").file("a/y/z", "");
    for upper in [
        Archive::new().file("a", "file").file("a/.wh.x", "").file("a/y/.wh.z", ""),
        Archive::new().file("a/.wh.x", "").file("a/y/.wh.z", "").file("a", "file"),
    ] {
        let found = image(&[&lower, &upper]);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["", "a"]);
        assert_eq!(found["a"].data, b"file");
    }
}

#[test]
fn a_directory_replaces_a_symbolic_link_of_a_lower_layer() {
    let lower = Archive::new().file("etc/passwd", "root").symlink("link", "etc");
    let found = image(&[&lower, &Archive::new().file("link/passwd", "x")]);
    assert_eq!(found["etc/passwd"].data, b"root");
    assert_eq!(found["link"].mode, 0o040_755);
    let found = image(&[&lower, &Archive::new().file("link/.wh.passwd", "")]);
    assert_eq!(found["etc/passwd"].data, b"root", "a whiteout does not go through a link");
    assert_eq!(found["link"].mode, 0o040_755);
}

#[test]
fn hard_links_are_names_of_one_file() {
    let archive = Archive::new()
        .file("a", "data")
        .link("d/b", "a")
        .link("c", "./d/b")
        .symlink("s", "t")
        .link("s2", "/s");
    let found = image(&[&archive]);
    for path in ["a", "d/b", "c"] {
        assert_eq!((found[path].same.as_str(), found[path].links), ("a", 3), "{path}");
    }
    assert_eq!((found["s2"].same.as_str(), found["s2"].links), ("s", 2));
    // A name that is replaced takes nothing from the others.
    let found = image(&[&archive.file("a", "new"), &Archive::new().file(".wh.c", "")]);
    assert_eq!((found["a"].data.as_slice(), found["a"].links), (b"new".as_slice(), 1));
    assert_eq!((found["d/b"].data.as_slice(), found["d/b"].links), (b"data".as_slice(), 1));
}

#[test]
fn hard_links_lead_to_lower_layers() {
    let lower = Archive::new().file("d/a", "data");
    let upper = Archive::new().link("b", "d/a").link("c", "b").file("d/.wh.a", "");
    let found = image(&[&lower, &Archive::new().file("other", ""), &upper]);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["", "b", "c", "d", "other"]);
    for path in ["b", "c"] {
        assert_eq!((found[path].data.as_slice(), found[path].links), (b"data".as_slice(), 2));
    }
}

#[test]
fn hard_links_lead_to_lower_layers_whether_whiteouts_come_before_or_after() {
    let lower = Archive::new().file("d/a", "data");
    for whiteout in ["d/.wh..wh..opq", ".wh..wh..opq", "d/.wh.a", ".wh.d"] {
        for upper in [
            Archive::new().link("b", "d/a").file(whiteout, ""),
            Archive::new().file(whiteout, "").link("b", "d/a"),
        ] {
            let found = image(&[&lower, &upper]);
            assert!(!found.contains_key("d/a"), "{whiteout}");
            assert_eq!((found["b"].data.as_slice(), found["b"].links), (b"data".as_slice(), 1), "{whiteout}");
            // Without the lower layer there is nothing that it could lead to.
            assert!(disk_of(&[unpack(&upper, Layout::Tar).unwrap()]).is_err(), "{whiteout}");
        }
    }
}

#[test]
fn hard_links_to_what_no_layer_has_are_refused() {
    let lower = Archive::new().file("d/a", "data").symlink("s", "d");
    for target in ["missing", "d", "s/a", "d/a/x"] {
        let upper = Archive::new().link("b", target);
        let layers = [&lower, &upper].map(|archive| unpack(archive, Layout::Tar).unwrap());
        let error = disk_of(&layers).err().unwrap();
        let wanted =
            format!("In layer 2, \"b\" is a hard link to \"{target}\", which is no file of a lower layer");
        assert_eq!(error.to_string(), wanted);
    }
}

#[test]
fn files_of_aufs_are_left_out() {
    let archive =
        Archive::new().file(".wh..wh.aufs", "").directory(".wh..wh.plnk/").file(".wh..wh.plnk/1.2", "x");
    assert!(paths(&[&archive.file("a/.wh..wh.orph/x", "")]).is_empty());
}

#[test]
fn an_image_may_have_no_layer() {
    assert_eq!(image(&[]).len(), 1);
    assert_eq!(image(&[&Archive::new(), &Archive::new()]).len(), 1);
}

#[test]
fn forty_layers_share_a_disk() {
    let archives: Vec<_> = (0..40)
        .map(|number| {
            Archive::new().file(format!("{number}"), format!("{number}")).file("last", format!("{number}"))
        })
        .collect();
    let found = image(&archives.iter().collect::<Vec<_>>());
    assert_eq!(found.len(), 42);
    assert_eq!(found["last"].data, b"39");
    assert_eq!(found["17"].data, b"17");
}

#[test]
fn what_is_not_in_the_layers_file_is_refused() {
    let layer = unpack(&Archive::new().file("a", [b'x'; 1000]), Layout::Tar).unwrap().layer;
    let write =
        |size| write_index(&[IndexLayer { tree: &layer.tree, size }], std::io::Cursor::new(Vec::new()));
    assert!(write(1512).is_ok());
    assert!(matches!(write(1511), Err(IndexError::Data(0))));
    assert!(matches!(write(1 << 41), Err(IndexError::TooLarge)));
    assert!(matches!(write(u64::MAX), Err(IndexError::TooLarge)));
    assert!(write((1 << 41) - (1 << 20)).is_ok());
}

#[test]
fn layers_of_one_image_have_one_layout() {
    let tree = |layout| unpack(&Archive::new(), layout).unwrap().layer.tree;
    let (one, other) = (tree(Layout::Tar), tree(Layout::Aligned));
    let layers = [IndexLayer { tree: &one, size: 0 }, IndexLayer { tree: &other, size: 0 }];
    assert!(matches!(write_index(&layers, std::io::Cursor::new(Vec::new())), Err(IndexError::Layouts)));
}

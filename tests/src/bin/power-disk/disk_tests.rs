#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;
use std::fs;

use super::*;

const SECTORS: u64 = 64;

struct Scene {
    folder: tempfile::TempDir,
    disk: Disk,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stable");
        File::create(&path).unwrap().set_len(SECTORS * SECTOR as u64).unwrap();
        Self { disk: Disk::open(&path).unwrap(), folder }
    }

    /// Writes `count` sectors that are full of `byte`.
    fn write(&mut self, first: u64, count: usize, byte: u8) {
        self.disk.write(first * SECTOR as u64, &vec![byte; count * SECTOR]).unwrap();
    }

    /// The first byte of each sector after a cut, and how the cut was.
    fn cut(&mut self, seed: u64) -> (Vec<u8>, Loss) {
        let image = self.folder.path().join("image");
        let loss = self.disk.cut(seed, &image).unwrap();
        (fs::read(image).unwrap().as_chunks::<SECTOR>().0.iter().map(|sector| sector[0]).collect(), loss)
    }
}

#[test]
fn readers_see_what_was_written_last() {
    let mut scene = Scene::new();
    scene.write(0, 4, 1);
    scene.disk.flush().unwrap();
    scene.write(1, 2, 2);
    scene.write(2, 1, 3);
    let data = scene.disk.read(0, 5 * SECTOR).unwrap();
    let bytes: Vec<u8> = data.as_chunks::<SECTOR>().0.iter().map(|sector| sector[SECTOR - 1]).collect();
    assert_eq!(bytes, [1, 2, 3, 1, 0]);
}

#[test]
fn what_was_flushed_is_in_every_image() {
    let mut scene = Scene::new();
    scene.write(0, 8, 1);
    scene.write(4, 8, 2);
    scene.disk.flush().unwrap();
    scene.write(20, 8, 3);
    for seed in 0..200 {
        let (bytes, _) = scene.cut(seed);
        assert_eq!(bytes[..12], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2], "seed {seed}");
    }
}

#[test]
fn nothing_that_comes_after_the_cut_is_in_an_image() {
    let mut scene = Scene::new();
    scene.write(0, 1, 1);
    scene.cut(0);
    scene.write(1, 1, 2);
    scene.disk.flush().unwrap();
    assert_eq!(scene.disk.read(SECTOR as u64, SECTOR).unwrap(), [2; SECTOR], "a reader sees it");
    for seed in 0..200 {
        assert_eq!(scene.cut(seed).0[1], 0, "seed {seed}");
    }
}

#[test]
fn cuts_lose_all_nothing_the_tail_and_anything_in_any_order() {
    let mut scene = Scene::new();
    scene.write(0, 8, 1);
    scene.write(8, 8, 2);
    let mut images = BTreeSet::new();
    for seed in 0..300 {
        let (bytes, loss) = scene.cut(seed);
        let lost = bytes[..16].iter().filter(|byte| **byte == 0).count();
        assert_eq!((loss.writes, loss.sectors), (2, lost), "seed {seed}");
        images.insert(bytes[..16].to_vec());
    }
    let image = |first: u8, second: u8| [[first; 8], [second; 8]].concat();
    for wanted in [image(0, 0), image(1, 2), image(1, 0), image(0, 2)] {
        assert!(images.contains(&wanted), "{wanted:?}");
    }
    let torn = |bytes: &Vec<u8>| bytes[..8] != [1; 8] && bytes[..8] != [0; 8];
    assert!(images.iter().any(torn), "a write is torn");
    assert!(images.len() > 50, "{}", images.len());
}

#[test]
fn a_sector_that_was_written_twice_has_any_of_its_contents() {
    let mut scene = Scene::new();
    scene.write(0, 1, 1);
    scene.disk.flush().unwrap();
    scene.write(0, 1, 2);
    scene.write(0, 1, 3);
    let found: BTreeSet<u8> = (0..200).map(|seed| scene.cut(seed).0[0]).collect();
    assert_eq!(found, BTreeSet::from([1, 2, 3]));
}

#[test]
fn the_power_fails_after_some_writes() {
    let mut scene = Scene::new();
    scene.disk.fail_after(2);
    for sector in 0..4 {
        scene.write(sector, 1, 1);
        assert_eq!(scene.disk.has_failed(), sector > 0);
    }
    let found: BTreeSet<Vec<u8>> = (0..200).map(|seed| scene.cut(seed).0[..4].to_vec()).collect();
    assert_eq!(found, BTreeSet::from([[0, 0], [0, 1], [1, 0], [1, 1]].map(|[a, b]| vec![a, b, 0, 0])));
}

#[test]
fn parts_of_sectors_and_places_beyond_the_end_are_refused() {
    let mut scene = Scene::new();
    assert_eq!(scene.disk.write(1, &[0; SECTOR]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert_eq!(scene.disk.write(0, &[0; 10]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    let end = SECTORS * SECTOR as u64;
    assert_eq!(scene.disk.write(end, &[0; SECTOR]).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert!(scene.disk.read(end, SECTOR).unwrap().is_empty());
}

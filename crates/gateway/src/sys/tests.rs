use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};

use super::*;

fn file(length: u64, seals: SealFlags) -> File {
    let fd = memfd_create("words", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let file = File::from(fd);
    file.set_len(length).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn words_that_are_written_are_in_the_file() {
    let owners = file(20, SealFlags::SHRINK);
    let words = map_words(owners.try_clone().unwrap().into()).unwrap();
    assert_eq!(words.len(), 2, "whole words only");
    words[1].store(7, Relaxed);
    let mut bytes = [0; 16];
    owners.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes[8..], 7_u64.to_ne_bytes());
}

#[test]
fn a_file_that_could_be_cut_or_is_empty_is_refused() {
    assert!(map_words(file(4096, SealFlags::GROW).into()).is_err());
    assert!(map_words(file(0, SealFlags::SHRINK).into()).is_err());
}

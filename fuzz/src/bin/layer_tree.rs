//! Trees of layers, as a process that a hostile archive has taken over could write them: whatever they say, merging them
//! and writing an index of them ends, with an index or an error.
#![no_main]

use std::io::Cursor;

use bathy_fuzz::Input;
use bathy_unpack::{IndexLayer, LayerTree, write_index};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let size = u64::from(input.u32());
    let mut trees = Vec::new();
    while !input.is_empty() && trees.len() < 4 {
        let length = usize::from(input.u16()) % 1024;
        let Ok(tree) = LayerTree::decode(input.take(length)) else { return };
        let encoded = tree.encode().expect("every tree is encoded");
        assert!(LayerTree::decode(&encoded).expect("it was valid before") == tree);
        trees.push(tree);
    }
    let layers: Vec<_> = trees.iter().map(|tree| IndexLayer { tree, size }).collect();
    let mut index = Cursor::new(Vec::new());
    if let Ok(info) = write_index(&layers, &mut index) {
        assert_eq!(info.size, index.get_ref().len() as u64);
        assert_eq!(info.layers.len(), layers.len());
        assert!(info.size < 64 << 20, "a small tree has a small index");
    }
});

//! What the process that unpacks a layer may ask of the host's kernel: to read the layer, and to write what is in it to two pipes.

use libc::F_GETFD;

use super::keeper::{ABORT, END, MEMORY, RUN, TIME_AND_CHANCE};
use super::{Filter, Group, Otherwise, is};

const MOVE: Group = Group {
    purpose: "read the layer, write what is in it",
    rules: &[
        any!(SYS_read),
        any!(SYS_write),
        any!(SYS_close),
        // Builds with assertions look at what they close.
        only!(SYS_fcntl, &[&[is(1, F_GETFD)]]),
    ],
};

/// The filter of the unpacker's process, which has one thread.
pub const UNPACKER: Filter = Filter {
    name: "unpacker",
    otherwise: Otherwise::Kill,
    groups: &[MOVE, MEMORY, TIME_AND_CHANCE, RUN, END, ABORT],
};

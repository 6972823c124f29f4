//! Ctrl-P Ctrl-Q detaches from a command without ending it.

const CTRL_P: u8 = 0x10;
const CTRL_Q: u8 = 0x11;

/// Detects the two keys in typed bytes.
#[derive(Debug, Default)]
pub(crate) struct DetachKeys {
    held: bool,
}

/// The result of one batch of typed bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Typed {
    /// Bytes to pass on.
    pub bytes: Vec<u8>,
    /// The user pressed the keys; later bytes are dropped.
    pub leave: bool,
}

impl DetachKeys {
    /// Processes typed bytes. A Ctrl-P is held back until the next key, because it may be the first of the
    /// two.
    pub fn take(&mut self, typed: &[u8]) -> Typed {
        let mut bytes = Vec::with_capacity(typed.len() + 1);
        for &byte in typed {
            if std::mem::take(&mut self.held) {
                if byte == CTRL_Q {
                    return Typed { bytes, leave: true };
                }
                bytes.push(CTRL_P);
            }
            if byte == CTRL_P {
                self.held = true;
            } else {
                bytes.push(byte);
            }
        }
        Typed { bytes, leave: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_keys_leave_also_when_they_come_apart() {
        let mut keys = DetachKeys::default();
        assert_eq!(keys.take(b"ab\x10"), Typed { bytes: b"ab".to_vec(), leave: false });
        assert!(keys.take(b"\x11xyz").leave);
    }

    #[test]
    fn a_lone_ctrl_p_is_passed_on() {
        let mut keys = DetachKeys::default();
        assert_eq!(keys.take(b"\x10\x10a").bytes, b"\x10\x10a");
    }
}

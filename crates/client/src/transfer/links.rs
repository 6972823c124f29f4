//! Decides which symbolic links are copied.

/// The longest link target that the system accepts.
pub(super) const MAX_TARGET: usize = 4095;

/// Checks that a link `depth` folders below the topmost one can only lead into the tree.
///
/// A `..` must not follow a name: the name may be another link, whose target's parent is not the link's
/// parent.
pub(super) fn stays_inside(target: &[u8], depth: usize) -> Result<(), &'static str> {
    if target.is_empty() || target.contains(&0) {
        return Err("it is a link to nothing");
    }
    if target.len() > MAX_TARGET {
        return Err("it is a link whose target is too long");
    }
    if target.starts_with(b"/") {
        return Err("it is a link to an absolute path");
    }
    let parts = target.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."));
    let up = parts.clone().take_while(|part| *part == b"..").count();
    if up > depth {
        return Err("it is a link that leads out of the copied tree");
    }
    if parts.skip(up).any(|part| part == b"..") {
        return Err("it is a link that may lead out of the copied tree");
    }
    Ok(())
}

//! U11: the jail's filter knows the guest kernel's calls by their address, so no guest program may have code there.

use std::time::Duration;

use bathy_jail::filter::{KERNEL_TEXT, STUB_CODE};
use bathy_tests::patience;

use crate::run::Run;

/// Tries to; see the file.
const PLACES: &str = include_str!("places.py");
/// Ways by which the guest kernel could give it memory there (13), and by which the stub could (3).
const REFUSED: usize = 16;

#[test]
fn u11_guest_programs_have_no_code_where_the_guest_kernel_has_its_own() {
    let [start, end, stub] =
        [KERNEL_TEXT.start.into(), KERNEL_TEXT.end.into(), STUB_CODE].map(|address| format!("{address:x}"));
    let ran = Run::start(&["--", "python3", "-c", PLACES, &start, &end, &stub])
        .finish(patience(Duration::from_secs(60)));
    let count = |word: &str| ran.stdout.lines().filter(|line| line.starts_with(word)).count();
    assert!(
        ran.stdout.starts_with("a program elsewhere: 42\nelsewhere, through the stub: DONE\n"),
        "{ran:?}"
    );
    assert_eq!(count("refused: "), REFUSED, "{}\n{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.ends_with("the guest goes on\n"), "{}", ran.stdout);
}

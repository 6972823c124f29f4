//! How a Bash context is started: the driver is an argument, descriptor 5 is the request file.

/// The command line; the program is looked up in the sandbox's PATH, and messages begin with its name.
pub const ARGV: [&str; 6] = ["bash", "--noprofile", "--norc", "-c", include_str!("bash.sh"), "bash"];

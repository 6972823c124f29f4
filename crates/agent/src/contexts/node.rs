//! How a Node context is started: the driver is read from descriptor 5, so `ps` shows one short line.

/// The driver's source in three parts, which the interpreter reads from descriptor 5.
pub const SOURCE: &str =
    concat!(include_str!("node_values.js"), include_str!("node_source.js"), include_str!("node.js"));

/// Reads the driver and runs it as the body of a function, so that its variables are invisible to cells.
const BOOT: &str = "{const f=require('fs');const s=f.readFileSync(5,'utf8');f.closeSync(5);\
    new Function('require',s)(require)}";

/// The command line; the program is looked up in the sandbox's PATH. An interrupted callback leaves Node's
/// stack of async contexts one entry too high, which Node would otherwise take for corruption and abort.
pub const ARGV: [&str; 5] = ["node", "--no-warnings", "--no-force-async-hooks-checks", "-e", BOOT];

//! How a Python context is started: the driver is read from descriptor 5, so `ps` shows one short line.

/// The driver's source, which the interpreter reads from descriptor 5. The part after a form feed is compiled
/// on demand.
pub const SOURCE: &str = concat!(
    include_str!("python_values.py"),
    include_str!("python.py"),
    "\x0c",
    include_str!("python_rich.py"),
    "\x0c",
    include_str!("python_magics.py"),
);

/// Reads the driver and runs it in its own namespace, so that the cells' `__main__` stays clean, and with its
/// own built-ins, so that a cell may replace `open` or `len` without breaking the driver.
const BOOT: &str = "exec(compile(open(5,'rb',closefd=False).read().split(b'\\f')[0],'<driver>','exec'),\
    {'__name__':'<driver>','__builtins__':{**vars(__builtins__)}})";

/// The command line; the program is looked up in the sandbox's PATH.
pub const ARGV: [&str; 3] = ["python3", "-c", BOOT];

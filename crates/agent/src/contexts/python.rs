//! How a Python context is started: the driver arrives on descriptor 5, so `ps` shows one short line.

/// The driver's source, given to the interpreter as descriptor 5. What follows a form feed is compiled when it is needed.
pub const SOURCE: &str = concat!(
    include_str!("python_values.py"),
    include_str!("python.py"),
    "\x0c",
    include_str!("python_rich.py"),
    "\x0c",
    include_str!("python_magics.py"),
);

/// Reads the driver and runs it in a namespace of its own, so that the cells' `__main__` stays clean, with built-ins of
/// its own, so that a cell may replace `open` or `len` without breaking the driver.
const BOOT: &str = "exec(compile(open(5,'rb',closefd=False).read().split(b'\\f')[0],'<driver>','exec'),\
    {'__name__':'<driver>','__builtins__':{**vars(__builtins__)}})";

/// The command line; the program is looked up in the sandbox's PATH.
pub const ARGV: [&str; 3] = ["python3", "-c", BOOT];

//! The user interface: output, exit codes, terminals, tables, prompts.

pub mod cell;
pub mod colour;
pub mod denials;
pub mod escape;
pub mod exit_code;
pub mod hints;
pub mod images;
pub mod interrupts;
pub mod mistakes;
pub mod narrator;
pub mod output;
pub mod progress;
pub mod prompt;
pub mod screen;
pub mod signals;
pub mod stdio;
pub mod table;
pub mod terminal;
pub mod time;

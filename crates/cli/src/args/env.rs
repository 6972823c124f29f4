//! Environment variables of a command: given as options, inherited from the caller, or read from a file.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug, Default)]
pub struct EnvArgs {
    /// Set an environment variable, or pass on the caller's variable of this name. Can be repeated.
    #[arg(short, long, value_name = "NAME[=VALUE]", value_parser = variable)]
    env: Vec<(String, Vec<u8>)>,
    /// Read environment variables from this file, one NAME=VALUE per line; --env takes precedence. Lines that begin with # are
    /// comments. Can be repeated.
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
}

impl EnvArgs {
    /// All variables. The last of equal names wins, and options win over files.
    pub fn variables(&self) -> Result<BTreeMap<String, Vec<u8>>, String> {
        let mut all = BTreeMap::new();
        for path in &self.env_file {
            all.extend(read(path)?);
        }
        all.extend(self.env.iter().cloned());
        Ok(all)
    }
}

fn read(path: &Path) -> Result<Vec<(String, Vec<u8>)>, String> {
    let failed = |why: String| format!("Cannot read variables from {}: {why}", path.display());
    let text = fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim_start()));
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(number, line)| given(line).map_err(|why| failed(format!("line {number}: {why}"))))
        .collect()
}

/// Reads `NAME=VALUE`. A file often comes with a project, which may not choose what of the caller's environment it gets.
fn given(line: &str) -> Result<(String, Vec<u8>), String> {
    if line.contains('=') {
        return variable(line);
    }
    let name = line.trim_end();
    Err(format!(
        "{name:?} has no value. Write NAME=value in the file, or pass the caller's variable on with --env NAME on the command line"
    ))
}

/// Reads `NAME=VALUE`, or `NAME` for the caller's own variable.
fn variable(text: &str) -> Result<(String, Vec<u8>), String> {
    let name = text.split_once('=').map_or(text, |(name, _)| name);
    // `export A=1` and `A = 1` mean different things to shells and to other tools.
    if name.contains(char::is_whitespace) {
        return Err(format!(
            "{name:?} is not the name of a variable. Write NAME=VALUE without spaces before the value"
        ));
    }
    if text.contains('=') {
        return bathy_spec::variable(text).map_err(|error| error.to_string());
    }
    let (name, _) = bathy_spec::variable(&format!("{text}=")).map_err(|error| error.to_string())?;
    match env::var_os(&name) {
        Some(value) => Ok((name, value.into_vec())),
        None => Err(format!("{name} is not set here. Set it first, or write {name}=VALUE")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        env: EnvArgs,
    }

    fn variables(line: &[&str]) -> Result<BTreeMap<String, Vec<u8>>, String> {
        let parsed = Line::try_parse_from([&["test"], line].concat()).map_err(|error| error.to_string())?;
        parsed.env.variables()
    }

    #[test]
    fn a_variable_is_given_or_the_callers_own() {
        let all = variables(&["-e", "A=1=2", "-e", "PATH", "-e", "EMPTY="]).unwrap();
        assert_eq!(all["A"], b"1=2");
        assert_eq!(all["PATH"], env::var_os("PATH").unwrap().into_vec());
        assert_eq!(all["EMPTY"], b"");
        let error = variables(&["-e", "BATHY_NO_SUCH_VARIABLE"]).unwrap_err();
        assert!(error.contains("BATHY_NO_SUCH_VARIABLE is not set here"), "{error}");
        assert!(variables(&["-e", "=x"]).is_err());
        assert!(variables(&["-e", ""]).is_err());
        for odd in ["A =1", "export A=1", "A B=1", "A B"] {
            assert!(variables(&["-e", odd]).unwrap_err().contains("not the name"), "{odd}");
        }
    }

    #[test]
    fn a_file_has_lines_of_variables_and_options_win() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        write!(file, "# of the project\n\nA=file\n  B=two words \n").unwrap();
        let path = file.path().to_str().unwrap();
        let all = variables(&["--env-file", path, "-e", "A=option"]).unwrap();
        assert_eq!((all["A"].as_slice(), all["B"].as_slice()), (&b"option"[..], &b"two words "[..]));
        assert_eq!(all.len(), 2);
    }

    #[test]
    fn a_file_does_not_take_the_callers_variables() {
        for name in ["PATH", "PATH ", "BATHY_NO_SUCH_VARIABLE"] {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            write!(file, "A=1\n{name}\n").unwrap();
            let error = variables(&["--env-file", file.path().to_str().unwrap()]).unwrap_err();
            assert!(error.contains("line 2") && error.contains(name.trim_end()), "{error}");
            assert!(error.contains("NAME=value in the file") && error.contains("--env NAME"), "{error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named_with_its_line() {
        let error = variables(&["--env-file", "/nowhere/.env"]).unwrap_err();
        assert!(error.contains("/nowhere/.env"), "{error}");
        let mut file = tempfile::NamedTempFile::new().unwrap();
        write!(file, "A=1\nexport B=2\n").unwrap();
        let error = variables(&["--env-file", file.path().to_str().unwrap()]).unwrap_err();
        assert!(error.contains("line 2") && error.contains("not the name"), "{error}");
    }
}

//! From a request of the host to a running process.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use bathy_protocol::{Exec, RefusalKind, Refused};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::sys::{self, Program, Step};
use crate::users::{self, User};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A started command and our ends of its pipes.
pub struct Started {
    /// Its process number; also its session and process group.
    pub pid: u32,
    /// Where its standard input is written, if it has one.
    pub stdin: Option<OwnedFd>,
    /// Where its standard output is read.
    pub stdout: OwnedFd,
    /// Where its standard error is read.
    pub stderr: OwnedFd,
}

/// Starts a command, or says why not.
pub fn start(request: &Exec) -> Result<Started, Refused> {
    let user = users::find(&request.user).map_err(bad_request)?;
    let argv = c_strings(&request.argv)?;
    let Some(name) = request.argv.first().filter(|name| !name.is_empty()) else {
        return Err(bad_request("the command is empty".to_owned()));
    };
    let env = c_strings(&environment(request, &user))?;
    let cwd = c_string(request.cwd.as_deref().unwrap_or(user.home.as_bytes()))?;
    let candidates = candidates(name, &request.env)?;

    let failed = |error: rustix::io::Errno| bad_request(format!("cannot make the command's pipes: {error}"));
    let (stdin_read, stdin_write) = if request.stdin {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
        (read, Some(write))
    } else {
        let null =
            rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        (null, None)
    };
    let (stdout_read, stdout_write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
    let (stderr_read, stderr_write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
    // Only our ends may be non-blocking: the flag belongs to the open file, and programs expect theirs to block.
    for ours in [Some(&stdout_read), Some(&stderr_read), stdin_write.as_ref()].into_iter().flatten() {
        rustix::io::ioctl_fionbio(ours, true).map_err(failed)?;
    }

    let program = Program {
        candidates: &candidates,
        argv: &argv,
        env: &env,
        cwd: &cwd,
        uid: user.uid,
        gid: user.gid,
        groups: &user.groups,
        stdio: [stdin_read.as_fd(), stdout_write.as_fd(), stderr_write.as_fd()],
    };
    let pid = sys::start(&program).map_err(|(step, error)| refusal(step, &error, name, &cwd, &user))?;
    Ok(Started { pid, stdin: stdin_write, stdout: stdout_read, stderr: stderr_read })
}

fn refusal(step: Step, error: &io::Error, name: &[u8], cwd: &CString, user: &User) -> Refused {
    let name = String::from_utf8_lossy(name);
    let (kind, message) = match (step, error.raw_os_error()) {
        (Step::Exec, Some(libc::ENOENT)) => (RefusalKind::NotFound, format!("{name}: no such program")),
        (Step::Exec, Some(libc::E2BIG)) => {
            (RefusalKind::NotExecutable, format!("{name}: the arguments and environment are too long"))
        }
        (Step::Exec, Some(libc::EAGAIN | libc::ENOMEM)) => {
            (RefusalKind::BadRequest, format!("{name}: the sandbox is out of processes or memory: {error}"))
        }
        (Step::Exec, _) => (RefusalKind::NotExecutable, format!("{name}: {error}")),
        (Step::Chdir, _) => {
            (RefusalKind::BadRequest, format!("working directory {}: {error}", cwd.to_string_lossy()))
        }
        (Step::Identity, _) => {
            (RefusalKind::BadRequest, format!("cannot become user {}: {error}", user.name))
        }
        (Step::Stdio, _) => (RefusalKind::BadRequest, format!("cannot connect the command's pipes: {error}")),
    };
    Refused { kind, message }
}

fn bad_request(message: String) -> Refused {
    Refused { kind: RefusalKind::BadRequest, message }
}

fn c_string(bytes: &[u8]) -> Result<CString, Refused> {
    CString::new(bytes).map_err(|_| {
        bad_request(format!(
            "{:?} contains a zero byte, which no program can be given",
            String::from_utf8_lossy(bytes)
        ))
    })
}

fn c_strings(list: &[Vec<u8>]) -> Result<Vec<CString>, Refused> {
    list.iter().map(|bytes| c_string(bytes)).collect()
}

/// The request's environment, and what every program expects besides.
fn environment(request: &Exec, user: &User) -> Vec<Vec<u8>> {
    let mut env = request.env.clone();
    let usual = [
        ("HOME", user.home.as_str()),
        ("USER", &user.name),
        ("LOGNAME", &user.name),
        ("SHELL", &user.shell),
        ("PATH", DEFAULT_PATH),
    ];
    for (name, value) in usual {
        if variable(&request.env, name).is_none() {
            env.push(format!("{name}={value}").into_bytes());
        }
    }
    env
}

fn variable<'a>(env: &'a [Vec<u8>], name: &str) -> Option<&'a [u8]> {
    env.iter().rev().find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}

/// Where a program of this name may be.
fn candidates(name: &[u8], env: &[Vec<u8>]) -> Result<Vec<CString>, Refused> {
    if name.contains(&b'/') {
        return Ok(vec![c_string(name)?]);
    }
    let path = variable(env, "PATH").unwrap_or(DEFAULT_PATH.as_bytes());
    path.split(|byte| *byte == b':')
        .map(|folder| {
            let folder = if folder.is_empty() { b".".as_slice() } else { folder };
            c_string(&[folder, b"/", name].concat())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_name_is_looked_up_along_the_given_path() {
        let env = vec![b"PATH=/a::/b".to_vec()];
        let found = candidates(b"tool", &env).unwrap();
        let found: Vec<_> = found.iter().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(found, ["/a/tool", "./tool", "/b/tool"]);
    }

    #[test]
    fn a_path_is_taken_as_it_is() {
        assert_eq!(candidates(b"./x", &[]).unwrap(), [c"./x".to_owned()]);
    }

    #[test]
    fn a_zero_byte_is_refused_and_named() {
        let refused = c_strings(&[b"a\0b".to_vec()]).unwrap_err();
        assert_eq!(refused.kind, RefusalKind::BadRequest);
        assert!(refused.message.contains("zero byte"));
    }

    #[test]
    fn the_request_wins_over_the_usual_environment() {
        let user = User {
            name: "u".into(),
            uid: 1,
            gid: 1,
            groups: vec![],
            home: "/h".into(),
            shell: "/bin/sh".into(),
        };
        let request = Exec { env: vec![b"HOME=/elsewhere".to_vec()], ..Exec::default() };
        let env = environment(&request, &user);
        assert_eq!(env.iter().filter(|entry| entry.starts_with(b"HOME=")).count(), 1);
        assert_eq!(variable(&env, "USER"), Some(b"u".as_slice()));
    }
}

//! Credential helpers: `docker-credential-NAME get`, with the registry on its input.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use zeroize::Zeroizing;

use super::{Credentials, CredentialsError, Secret};
use crate::text::plain;

const MAX_ANSWER: u64 = 64 << 10;
const POLL: Duration = Duration::from_millis(5);
/// The output of a helper that has no credentials.
const NOT_FOUND: &str = "credentials not found";
/// The user's name if the secret is an identity token.
const TOKEN_USER: &str = "<token>";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: Secret,
}

/// Asks a helper for the credentials for `registry`.
pub fn get(name: &str, registry: &str, time: Duration) -> Result<Option<Credentials>, CredentialsError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || !name.bytes().all(fits) {
        return Err(CredentialsError::HelperName(plain(name, 60)));
    }
    run(&format!("docker-credential-{name}"), registry, time)
}

fn run(program: &str, registry: &str, time: Duration) -> Result<Option<Credentials>, CredentialsError> {
    let start = |error| CredentialsError::HelperStart(program.to_owned(), error);
    let mut command = Command::new(program);
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let mut child = command.spawn().map_err(start)?;
    let asked = ask(&mut child, program, registry, time);
    if asked.is_err() {
        end(&mut child);
    }
    let (is_success, answer) = asked?;
    if !is_success {
        let is_unknown = answer.contains(NOT_FOUND);
        // Other output is not shown: it may contain secrets.
        return if is_unknown { Ok(None) } else { Err(failed(program, "its exit status is not 0")) };
    }
    let answer: Answer =
        serde_json::from_str(&answer).map_err(|_| CredentialsError::HelperAnswer(program.to_owned()))?;
    Ok(match answer.username.as_str() {
        _ if answer.secret.reveal().is_empty() => None,
        TOKEN_USER => Some(Credentials::IdentityToken(answer.secret)),
        _ => Some(Credentials::Password { user: answer.username, password: answer.secret }),
    })
}

fn failed(program: &str, reason: &str) -> CredentialsError {
    CredentialsError::HelperFailed(program.to_owned(), reason.to_owned())
}

/// Writes the request and reads the response, both with a time limit.
fn ask(
    child: &mut Child,
    program: &str,
    registry: &str,
    time: Duration,
) -> Result<(bool, Zeroizing<String>), CredentialsError> {
    let deadline = Instant::now() + time;
    let late = || CredentialsError::HelperTime(program.to_owned(), time);
    let (mut stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let (sender, receiver) = mpsc::channel();
    let registry = registry.to_owned();
    // It ends with the helper, whose whole group is killed if it takes too long.
    thread::spawn(move || {
        // A helper that does not read it may know the answer all the same.
        let _ = stdin.as_mut().map(|stdin| stdin.write_all(registry.as_bytes()));
        drop(stdin);
        let mut answer = Zeroizing::new(String::new());
        let read = stdout.map(|stdout| stdout.take(MAX_ANSWER + 1).read_to_string(&mut answer));
        let _ = sender.send(read.is_some_and(|read| read.is_ok()).then_some(answer));
    });
    let answer = receiver.recv_timeout(time).map_err(|_| late())?;
    let answer = answer.filter(|answer| answer.len() as u64 <= MAX_ANSWER);
    let answer = answer.ok_or_else(|| failed(program, "its answer is too long or is no text"))?;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok((status.success(), answer)),
            Ok(None) if Instant::now() < deadline => thread::sleep(POLL),
            Ok(None) => return Err(late()),
            Err(_) => return Err(failed(program, "it cannot be waited for")),
        }
    }
}

fn end(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// The path of a helper that runs this script. A path is no helper's name: only tests give one.
    fn asked(script: &str, time: Duration) -> Result<Option<Credentials>, CredentialsError> {
        // A script is not run while another thread's new process has it open for writing.
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let home = tempfile::tempdir().unwrap();
        let program = home.path().join("docker-credential-test");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o700)).unwrap();
        run(program.to_str().unwrap(), "ghcr.io", time)
    }

    const TIME: Duration = Duration::from_secs(60);

    #[test]
    fn a_helper_gets_the_registry_and_gives_credentials() {
        let script = r#"[ "$1" = get ] && read host; printf '{"ServerURL":"x","Username":"me","Secret":"for %s"}' "$host""#;
        let expected =
            Credentials::Password { user: "me".into(), password: Secret::new("for ghcr.io".into()) };
        assert_eq!(asked(script, TIME).unwrap(), Some(expected));
        let script = r#"echo '{"ServerURL":"x","Username":"<token>","Secret":"t"}'"#;
        assert_eq!(asked(script, TIME).unwrap(), Some(Credentials::IdentityToken(Secret::new("t".into()))));
        let script = "echo 'credentials not found in native keychain'; exit 1";
        assert_eq!(asked(script, TIME).unwrap(), None);
    }

    #[test]
    fn a_helper_that_fails_is_named_and_not_quoted() {
        for script in ["echo hunter2; exit 1", "echo hunter2", "echo '{\"Username\": hunter2'"] {
            let error = asked(script, TIME).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
        assert!(matches!(get("no-such-helper", "x", TIME), Err(CredentialsError::HelperStart(..))));
        for name in ["", "a/b", "../x", "a b", "ä"] {
            assert!(matches!(get(name, "x", TIME), Err(CredentialsError::HelperName(_))), "{name}");
        }
    }

    #[test]
    fn time_and_output_are_bounded() {
        let began = Instant::now();
        // Also what it started holds its output open.
        let error = asked("sleep 600 & sleep 600", Duration::from_millis(300)).unwrap_err();
        assert!(matches!(error, CredentialsError::HelperTime(..)), "{error:?}");
        let error = asked("exec >&-; sleep 600", Duration::from_millis(300)).unwrap_err();
        assert!(matches!(error, CredentialsError::HelperTime(..)), "{error:?}");
        let error = asked("exec yes", TIME).unwrap_err();
        assert!(matches!(error, CredentialsError::HelperFailed(..)), "{error:?}");
        assert!(began.elapsed() < TIME);
    }
}

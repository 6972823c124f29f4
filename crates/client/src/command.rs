//! Builds the agent's requests for commands.

use std::collections::BTreeMap;

use bathy_audit::What;
use bathy_audit::event::{argv, digest};
use bathy_image::ImageConfig;
use bathy_protocol::cell::{Cell, Surroundings};
use bathy_protocol::{Exec, Exit, Restriction, TerminalSize, WorkEnd};
use bathy_spec::{CommandSpec, SandboxSpec};

/// How a command is connected and restricted.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExecOptions {
    /// Whether standard input is forwarded.
    pub stdin: bool,
    /// The size of its terminal, if it gets one.
    pub terminal: Option<TerminalSize>,
    /// A restriction in addition to the sandbox's own setting.
    pub restricted: Option<Restriction>,
}

/// Builds the agent's request for `command`. The command's settings take precedence over the specification's,
/// and these over the image's.
pub fn request(command: &CommandSpec, spec: &SandboxSpec, image: &ImageConfig, options: ExecOptions) -> Exec {
    let mut env: BTreeMap<&str, &[u8]> =
        image.env.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    env.extend(spec.env.iter().map(|(name, value)| (name.as_str(), value.as_bytes())));
    env.extend(command.env.iter().map(|(name, value)| (name.as_str(), value.as_slice())));
    let user = command.user.clone().or_else(|| spec.user.clone());
    // The image's directory belongs to the image's user; another user starts at home.
    let image_cwd = || user.is_none().then(|| image.cwd.clone().into_bytes());
    let spec_cwd = || spec.workdir.as_ref().map(|folder| folder.clone().into_bytes());
    let restrictions = [spec.restriction(), options.restricted];
    let is_read_only = restrictions.into_iter().flatten().any(|restriction| !restriction.writable_root);
    // Programs expect their working directory to be writable.
    let usual_cwd = || if is_read_only { Some(b"/tmp".to_vec()) } else { image_cwd() };
    Exec {
        argv: command.argv.clone(),
        env: env.into_iter().map(|(name, value)| [name.as_bytes(), b"=", value].concat()).collect(),
        cwd: command.cwd.clone().or_else(spec_cwd).or_else(usual_cwd),
        user: user.unwrap_or_else(|| image.user.clone()),
        stdin: options.stdin,
        terminal: options.terminal,
        restricted: options.restricted,
    }
}

/// The environment of a sandbox's commands, for interpreters.
pub fn surroundings(
    command: &CommandSpec,
    spec: &SandboxSpec,
    image: &ImageConfig,
    restricted: Option<Restriction>,
) -> Surroundings {
    let exec = request(command, spec, image, ExecOptions { restricted, ..ExecOptions::default() });
    Surroundings { env: exec.env, cwd: exec.cwd, user: exec.user, restricted: exec.restricted }
}

/// A unique random tag for a piece of work.
pub fn new_tag() -> std::io::Result<u64> {
    let mut bytes = [0u8; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(bytes))
}

/// The tag as it appears in the audit log.
pub fn tag_text(tag: u64) -> String {
    format!("{tag:016x}")
}

/// The event of a command that is about to run.
pub fn exec_started(exec: &Exec, tag: u64, job: Option<u32>) -> What {
    let shown = argv(&exec.argv);
    What::ExecStarted {
        exec: tag_text(tag),
        argv: shown.argv,
        user: exec.user.clone(),
        job,
        terminal: exec.terminal.is_some(),
        argv_bytes: shown.bytes,
        argv_digest: shown.digest,
    }
}

/// The event of a cell that is about to run.
pub fn code_started(cell: &Cell, tag: u64) -> What {
    What::CodeStarted {
        exec: tag_text(tag),
        language: cell.language.as_str().to_owned(),
        context: cell.context.clone(),
        code: argv(&[&cell.code]).argv.into_iter().next().unwrap_or_default(),
        code_bytes: u64::try_from(cell.code.len()).unwrap_or(u64::MAX),
        code_digest: digest(cell.code.as_bytes()),
    }
}

/// Describes how a piece of work ended. A refusal is text from the guest: escape it before printing.
pub fn exit_text(end: &WorkEnd) -> String {
    match end {
        WorkEnd::Exited(Exit::Code(code)) => format!("code {code}"),
        WorkEnd::Exited(Exit::Signal(signal)) => format!("signal {signal}"),
        WorkEnd::Refused(message) => format!("refused: {}", message.chars().take(500).collect::<String>()),
    }
}

#[cfg(test)]
mod tests {
    use bathy_spec::Security;

    use super::*;

    #[test]
    fn a_command_begins_where_it_can_write() {
        let image =
            ImageConfig { cwd: "/home/user".to_owned(), user: "user".to_owned(), ..ImageConfig::default() };
        let begins = |command: &CommandSpec, spec: &SandboxSpec, restricted| {
            let exec = request(command, spec, &image, ExecOptions { restricted, ..ExecOptions::default() });
            exec.cwd.map(|folder| String::from_utf8(folder).unwrap())
        };
        let (command, open) = (CommandSpec::default(), SandboxSpec::default());
        let strict = SandboxSpec { security: Security::Restricted, ..SandboxSpec::default() };
        let read_only = Some(Restriction { writable_root: false });
        let folder = |name: &str| Some(name.to_owned());
        assert_eq!(begins(&command, &open, None), folder("/home/user"));
        assert_eq!(begins(&command, &strict, None), folder("/tmp"));
        assert_eq!(begins(&command, &open, read_only), folder("/tmp"));
        let writable = SandboxSpec { writable_root: true, ..strict.clone() };
        assert_eq!(begins(&command, &writable, None), folder("/home/user"));
        assert_eq!(begins(&command, &writable, read_only), folder("/tmp"));
        let asked = CommandSpec { cwd: Some(b"/usr".to_vec()), ..CommandSpec::default() };
        assert_eq!(begins(&asked, &strict, None), folder("/usr"));
        let described = SandboxSpec { workdir: Some("/opt".to_owned()), ..strict };
        assert_eq!(begins(&command, &described, None), folder("/opt"));
    }
}

//! `bathy login` and `bathy logout`: credentials for registries.

use std::error::Error;
use std::io::{self, BufRead, IsTerminal, Read, Write};

use bathy_manager::Manager;
use bathy_registry::{Credentials, LoginCheck, Secret, reference};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

use crate::ui::output;

/// More than any password or token.
const MAX_PASSWORD: u64 = 64 << 10;

/// Arguments of `bathy login`.
#[derive(clap::Args)]
pub struct LoginArgs {
    /// The registry: HOST or HOST:PORT.
    #[arg(default_value = reference::DOCKER_HUB)]
    registry: String,
    /// The user; asked for on a terminal.
    #[arg(short, long)]
    username: Option<String>,
    /// Read the password or token from standard input.
    #[arg(long)]
    password_stdin: bool,
    /// Use plain HTTP, for a registry on this machine.
    #[arg(long)]
    insecure: bool,
}

/// Arguments of `bathy logout`.
#[derive(clap::Args)]
pub struct LogoutArgs {
    /// The registry: HOST or HOST:PORT.
    #[arg(default_value = reference::DOCKER_HUB)]
    registry: String,
}

/// Keeps a login that the registry accepts.
pub fn login(args: &LoginArgs) -> Result<u8, Box<dyn Error>> {
    let registry = reference::registry(&args.registry)?;
    let user = match &args.username {
        Some(user) => user.clone(),
        None if args.password_stdin => return Err("--password-stdin needs the user: --username NAME".into()),
        None => ask(&format!("Username for {registry}: "), true)?,
    };
    let password = if args.password_stdin {
        let mut text = String::new();
        io::stdin().take(MAX_PASSWORD).read_to_string(&mut text)?;
        text.trim_end_matches(['\r', '\n']).to_owned()
    } else {
        ask("Password: ", false)?
    };
    if user.is_empty() || password.is_empty() {
        return Err("a login needs a user and a password".into());
    }
    let credentials = Credentials::Password { user, password: Secret::new(password) };
    match Manager::open("bathy login")?.login(&registry, &credentials, args.insecure)? {
        LoginCheck::Accepted => output::line(format_args!("{registry} accepts the login"))?,
        LoginCheck::NotAsked => output::line(format_args!(
            "the login for {registry} is kept; whether it is right shows when the registry asks for it"
        ))?,
    }
    Ok(0)
}

/// Forgets a login.
pub fn logout(args: &LogoutArgs) -> Result<u8, Box<dyn Error>> {
    let registry = reference::registry(&args.registry)?;
    if Manager::open("bathy logout")?.logout(&registry)? {
        output::line(format_args!("the login for {registry} is removed"))?;
    } else {
        output::note(format_args!("there is no login for {registry}"));
    }
    Ok(0)
}

/// Asks on the terminal.
fn ask(question: &str, echo: bool) -> Result<String, Box<dyn Error>> {
    let input = io::stdin();
    if !input.is_terminal() {
        return Err("there is no terminal to ask on. Use --username NAME --password-stdin".into());
    }
    write!(io::stderr(), "{question}")?;
    let before = tcgetattr(&input)?;
    let mut hidden = before.clone();
    if !echo {
        hidden.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&input, OptionalActions::Now, &hidden)?;
    }
    let mut line = String::new();
    let read = input.lock().take(MAX_PASSWORD).read_line(&mut line);
    if !echo {
        tcsetattr(&input, OptionalActions::Now, &before)?;
        writeln!(io::stderr())?;
    }
    read?;
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}

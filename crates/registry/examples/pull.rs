//! The smallest client: pulls a reference into a folder and says what happens. `cargo run --example pull -- FOLDER REFERENCE`
//! adds `--insecure` for a registry on this machine.

use std::error::Error;
use std::path::Path;

use bathy_registry::http::Proxies;
use bathy_registry::{Client, Event, Keychain, Options, Store};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (insecure, named): (Vec<_>, Vec<_>) =
        arguments.iter().partition(|argument| *argument == "--insecure");
    let [folder, reference] = named.as_slice() else { return Err("usage: pull FOLDER REFERENCE".into()) };
    let proxies = Proxies::of_environment();
    let options = Options { insecure: !insecure.is_empty(), proxies, ..Options::default() };
    let client = Client::new(options, Keychain::new(None, Keychain::docker_config()));
    let store = Store::open(Path::new(folder))?;
    let pulled = client.pull(&store, &reference.parse()?, &mut |event: &Event| println!("{event:?}"))?;
    println!("{} is {}", pulled.record.reference, pulled.record.pinned);
    Ok(())
}

//! x
use std::error::Error;
/// a
#[derive(clap::Args)]
pub struct Args {
    #[arg(long)]
    json: bool,
}
pub fn run(args: &Args) -> Result<u8, Box<dyn Error>> { let _ = args.json; Ok(0) }
pub fn probe_kvm() -> Result<u8, Box<dyn Error>> { Ok(0) }

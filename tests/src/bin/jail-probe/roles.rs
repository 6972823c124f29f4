//! Bad guest kernels (U2, U4, U5).

use std::process::ExitCode;
use std::time::Duration;

use crate::sys;

/// The first device's socket.
const DEVICES: std::ops::Range<i32> = 6..10;

/// Behaves as the named role does. Returns if that one ends.
pub fn play(role: &str) -> ExitCode {
    // Outside a pid namespace of its own this program would end, stop or fill the whole machine.
    if std::process::id() != 1 {
        println!("roles are only played by the first process of a pid namespace");
        return ExitCode::FAILURE;
    }
    match role {
        "silent" => wait(),
        "exits" => ExitCode::from(3),
        "floods" => loop {
            let _ = sys::write(1, &[b'x'; 4096]);
        },
        "spins" => loop {
            std::hint::spin_loop();
        },
        "hangs-up" => {
            DEVICES.for_each(sys::close);
            wait()
        }
        "half-a-message" => {
            let _ = sys::write(6, &[1, 0, 0]);
            wait()
        }
        "forks" => {
            let count = sys::fork_until_refused(100_000).len();
            println!("processes: {count}");
            wait()
        }
        "kills" => {
            let count = sys::fork_until_refused(5).len();
            println!("to everybody: {:?}", sys::signal(-1, libc::SIGKILL));
            println!("to its group of {}: {:?}", count + 1, sys::signal(0, libc::SIGKILL));
            ExitCode::from(9)
        }
        "stops" => {
            sys::fork_until_refused(5);
            println!("to everybody: {:?}", sys::signal(-1, libc::SIGSTOP));
            println!("to its group: {:?}", sys::signal(0, libc::SIGSTOP));
            wait()
        }
        other => match other.strip_prefix("garbage-").and_then(|device| device.parse::<i32>().ok()) {
            Some(device) => {
                let _ = sys::write(DEVICES.start + device, &[0xa5; 4096]);
                wait()
            }
            None => {
                println!("there is no role {other:?}");
                ExitCode::from(2)
            }
        },
    }
}

fn wait() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

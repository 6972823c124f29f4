//! Bad guest kernels (U2, U4, U5, U7 to U9, J9).

use std::time::Duration;

use crate::{FAILURE, greed, sys};

/// The first device's socket.
const DEVICES: std::ops::Range<i32> = 6..10;

/// Behaves as the named role does. Returns if that one ends.
pub fn play(role: &str) -> i32 {
    // Outside a pid namespace of its own this program would end, stop or fill the whole machine.
    if std::process::id() != 1 {
        println!("roles are only played by the first process of a pid namespace");
        return FAILURE;
    }
    match role {
        "silent" => wait(),
        "exits" => 3,
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
            9
        }
        "stops" => {
            sys::fork_until_refused(5);
            println!("to everybody: {:?}", sys::signal(-1, libc::SIGSTOP));
            println!("to its group: {:?}", sys::signal(0, libc::SIGSTOP));
            wait()
        }
        "crashes" => sys::crash(c"crash-in-jail"),
        other => numbered(other),
    }
}

/// A role whose name ends with a number.
fn numbered(role: &str) -> i32 {
    let (name, number) = role.rsplit_once('-').unwrap_or((role, ""));
    match (name, number.parse::<u16>()) {
        ("garbage", Ok(device)) => {
            let _ = sys::write(DEVICES.start + i32::from(device), &[0xa5; 4096]);
        }
        ("in-flight", Ok(limit)) => greed::descriptors_in_flight(limit.into()),
        ("sessions", Ok(count)) => greed::spinning_sessions(count.into()),
        ("tables", Ok(limit)) => greed::tables(limit.into()),
        _ => {
            println!("there is no role {role:?}");
            return 2;
        }
    }
    sys::rename_child(greed::DONE);
    wait()
}

fn wait() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

//! Guest kernels that take what limits of single processes do not hold (U7, U8, U9).

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::{Errno, IoSlice};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg,
    socketpair,
};
use rustix::process::{Resource, Rlimit, setrlimit, setsid};

use crate::sys;

/// The name of a process that appears when all is taken.
pub const DONE: &CStr = c"all-taken";
/// As many descriptors as one message can carry.
const IN_ONE_MESSAGE: usize = 253;
/// More than any limit lets it have.
const MOST: usize = 100_000;

/// As a kernel that was taken over while it ran: with the limit that it has by then.
fn lower_descriptors(limit: u64) {
    let lowered = setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) });
    println!("a limit of {limit} descriptors: {lowered:?}");
}

/// Sends as many descriptors as it can to sockets of its own, and receives none.
pub fn descriptors_in_flight(limit: u64) {
    lower_descriptors(limit);
    let mut sockets = Vec::new();
    let mut count = 0;
    while count < MOST {
        let Ok((from, to)) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::empty(), None)
        else {
            break;
        };
        let refusal = fill(&from, &mut count);
        sockets.extend([from, to]);
        if refusal == Errno::TOOMANYREFS {
            break;
        }
    }
    println!("descriptors in flight: {count}");
    // The sockets have to stay open.
    std::mem::forget(sockets);
}

/// Sends descriptors until it is refused.
fn fill(socket: &OwnedFd, count: &mut usize) -> Errno {
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(IN_ONE_MESSAGE))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors: [BorrowedFd<'_>; IN_ONE_MESSAGE] = [socket.as_fd(); IN_ONE_MESSAGE];
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        match sendmsg(socket, &[IoSlice::new(b"x")], &mut ancillary, SendFlags::DONTWAIT) {
            Ok(_) => *count += IN_ONE_MESSAGE,
            Err(error) => return error,
        }
    }
}

/// Processes that use all the processor time they get, each in a session of its own if it can.
pub fn spinning_sessions(count: usize) {
    let sessions = sys::fork_each(count, || {
        let _ = setsid();
        loop {
            std::hint::spin_loop();
        }
    });
    println!("spinning: {sessions}");
}

/// Processes with as many open files as they can have, half of them waiting for the other half.
pub fn tables(limit: u64) {
    lower_descriptors(limit);
    let processes = sys::fork_each(MOST, || {
        let half = usize::try_from(limit / 2).unwrap_or_default();
        let epolls: Vec<_> =
            (0..half).map_while(|_| epoll::create(epoll::CreateFlags::empty()).ok()).collect();
        let events: Vec<_> = (0..half).map_while(|_| eventfd(0, EventfdFlags::empty()).ok()).collect();
        for epoll in &epolls {
            for event in &events {
                let _ = epoll::add(epoll, event, epoll::EventData::new_u64(0), epoll::EventFlags::IN);
            }
        }
        // They stay open for as long as the process.
        std::mem::forget((epolls, events));
    });
    println!("processes: {processes}");
}

//! Cells that do not end, and interpreters that do.

use bathy_protocol::cell::CellEnd;

use super::*;

const STUBBORN: &str =
    "import time\nwhile True:\n  try:\n    time.sleep(10)\n  except BaseException:\n    pass";

#[test]
fn a_timeout_interrupts_and_keeps_the_state() {
    let mut guest = Guest::new();
    guest.run(python("x = 5"));
    let seen = guest.run(Cell { timeout_ms: 300, ..python("while True: pass") });
    let ended = seen.ended();
    assert_eq!((ended.interrupted, ended.state_lost), (Some(Interrupter::Timeout), false));
    assert!((300..5000).contains(&ended.ran_ms), "{ended:?}");
    assert!(seen.text(RecordKind::Error).contains("KeyboardInterrupt"));
    assert_eq!(seen.exit, Some(Exit::Code(1)));
    assert_eq!(guest.run(python("print(x)")).text(RecordKind::Stdout), "5\n");
}

#[test]
fn who_does_not_end_when_interrupted_is_killed() {
    let mut guest = Guest::new();
    let cell = Cell { timeout_ms: 100, grace_ms: 200, ..python(&format!("print('begun')\n{STUBBORN}")) };
    let seen = guest.run(cell);
    assert_eq!(seen.text(RecordKind::Stdout), "begun\n");
    let ended = seen.ended();
    assert_eq!((ended.end, ended.state_lost), (CellEnd::Killed, true));
    assert_eq!(ended.interrupted, Some(Interrupter::Timeout));
    let seen = guest.run(python("print('new')"));
    assert_eq!(seen.text(RecordKind::Stdout), "new\n");
    let started = seen.started();
    assert!(started.fresh && started.lost.is_some_and(|why| why.contains("killed")));
    assert_eq!(guest.run(python("1")).started().lost, None, "it is reported once");
}

#[test]
fn a_signal_interrupts_the_running_and_cancels_the_waiting() {
    let mut guest = Guest::new();
    let running = guest.ask(python("import time\nprint('runs', flush=True)\ntime.sleep(60)"));
    let waiting = guest.ask(python("print('never')"));
    guest.until(|guest| !guest.seen[&running].bytes(RecordKind::Stdout).is_empty());
    guest.send(waiting, &ToGuest::Signal(15));
    let ended = guest.finish(waiting).ended();
    assert_eq!((ended.end, ended.state_lost), (CellEnd::Cancelled, false));
    guest.send(running, &ToGuest::Signal(2));
    let ended = guest.finish(running).ended();
    assert_eq!((ended.interrupted, ended.state_lost), (Some(Interrupter::Asked), false));
}

#[test]
fn an_interrupt_that_comes_before_the_code_does_is_not_lost() {
    let mut guest = Guest::new();
    guest.run(python("x = 1"));
    let running = guest.ask(Cell { grace_ms: 1000, ..python("while True: pass") });
    // The request is in the pipe, but the interpreter may not have read it.
    guest.until(|guest| !guest.seen[&running].records.is_empty());
    guest.send(running, &ToGuest::Signal(2));
    assert!(!guest.finish(running).ended().state_lost);
}

#[test]
fn an_abandoned_cell_ends_and_its_context_stays() {
    let mut guest = Guest::new();
    guest.run(python("x = 6"));
    let stream = guest.ask(python("import time\nprint('runs', flush=True)\ntime.sleep(60)"));
    guest.until(|guest| !guest.seen[&stream].bytes(RecordKind::Stdout).is_empty());
    guest.send(stream, &ToGuest::Abandon);
    let seen = guest.finish(stream);
    assert_eq!((seen.exit, seen.bytes(RecordKind::Ended)), (Some(Exit::Code(1)), vec![]));
    assert_eq!(guest.run(python("print(x)")).text(RecordKind::Stdout), "6\n");
}

#[test]
fn a_new_conversation_knows_nothing_of_the_cells_before() {
    let mut guest = Guest::new();
    let stream = guest.ask(python("x = 7\nimport time\nprint('runs', flush=True)\ntime.sleep(60)"));
    guest.until(|guest| !guest.seen[&stream].bytes(RecordKind::Stdout).is_empty());
    let waiting = guest.ask(python("x = 8"));
    guest.contexts.end_conversation();
    assert_eq!(guest.run(python("print(x)")).text(RecordKind::Stdout), "7\n");
    assert_eq!((guest.seen[&stream].exit, guest.seen[&waiting].exit), (None, None));
}

#[test]
fn the_end_of_the_interpreter_is_reported() {
    let mut guest = Guest::new();
    let code = "import os\nprint('said', flush=True)\ndisplay(1)\nos._exit(3)";
    let seen = guest.run(python(code));
    assert_eq!(seen.text(RecordKind::Stdout), "said\n");
    assert!(seen.kinds().contains(&RecordKind::Display));
    assert_eq!((seen.ended().end, seen.ended().state_lost), (CellEnd::Exited(Exit::Code(3)), true));
    assert_eq!(seen.exit, Some(Exit::Code(1)));
    let seen = guest.run(python("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"));
    assert_eq!(seen.started().lost.as_deref(), Some("the interpreter ended with code 3"));
    assert_eq!(seen.ended().end, CellEnd::Exited(Exit::Signal(9)));
}

#[test]
fn an_interpreter_that_ends_between_cells_is_restarted() {
    let mut guest = Guest::new();
    guest.run(python("import threading, os\nthreading.Timer(0.1, lambda: os._exit(4)).start()"));
    guest.idle(Duration::from_millis(400));
    assert_eq!(guest.change(ContextsRequest::List).unwrap()[0].pid, None);
    let seen = guest.run(python("2 + 2"));
    assert_eq!(seen.started().lost.as_deref(), Some("the interpreter ended with code 4"));
    assert_eq!(seen.exit, Some(Exit::Code(0)));
}

#[test]
fn a_process_that_a_dead_interpreter_leaves_is_ended() {
    let mut guest = Guest::new();
    let code = "import os, subprocess\np = subprocess.Popen(['sleep', '600'])\nprint(p.pid, flush=True)\n\
        os._exit(0)";
    let pid: i32 = guest.run(python(code)).text(RecordKind::Stdout).trim().parse().unwrap();
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    guest.until(|_| state().is_empty() || state().contains(") Z"));
}

#[test]
fn packets_without_the_token_are_counted_and_dropped() {
    let mut guest = Guest::new();
    let code =
        "import os\nfor p in (b'', b'x', b'0' * 32 + b'f{}', b'y' * 70_000):\n  os.write(4, p)\nprint('on')";
    let seen = guest.run(python(code));
    assert_eq!(seen.text(RecordKind::Stdout), "on\n", "{:?}", seen.text(RecordKind::Error));
    assert_eq!((seen.ended().stray_packets, seen.exit), (4, Some(Exit::Code(0))));
}

#[test]
fn a_closed_channel_ends_the_interpreter() {
    let mut guest = Guest::new();
    let seen = guest.run(python("import os, time\nos.closerange(3, 1024)\ntime.sleep(60)"));
    assert_eq!((seen.ended().end, seen.ended().state_lost), (CellEnd::ChannelClosed, true));
    assert_eq!(guest.run(python("print(1)")).text(RecordKind::Stdout), "1\n");
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let mut guest = Guest::new();
    let empty = Surroundings { env: vec![b"PATH=/nowhere".to_vec()], ..surroundings() };
    let seen = guest.run(Cell { make: Some(empty), ..python("1") });
    let CellEnd::NotStarted(why) = seen.ended().end else { panic!("{:?}", seen.ended()) };
    assert_eq!(why, "python3 is not in this image: python needs it");
    // The next request may have a better environment.
    assert_eq!(guest.run(python("1")).exit, Some(Exit::Code(0)));
}

#[test]
fn an_interpreter_that_fails_to_start_says_why() {
    let mut guest = Guest::new();
    let broken = Surroundings { env: vec![b"PYTHONHOME=/nowhere".to_vec()], ..surroundings() };
    let seen = guest.run(Cell { make: Some(broken), ..python("1") });
    let CellEnd::NotStarted(why) = seen.ended().end else { panic!("{:?}", seen.ended()) };
    assert!(why.contains("ended with code 1") && why.contains("encodings"), "{why}");
}

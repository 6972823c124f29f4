//! Cells that run as intended.

use bathy_protocol::cell::CellEnd;

use super::*;

#[test]
fn state_stays_from_cell_to_cell() {
    let mut guest = Guest::new();
    let seen = guest.run(python("x = 20\n1 + 1"));
    assert!(seen.text(RecordKind::Result).contains("\"2\""), "{:?}", seen.records);
    assert_eq!(seen.exit, Some(Exit::Code(0)));
    assert_eq!((seen.started().fresh, seen.started().lost), (true, None));
    let seen = guest.run(python("print(x + 2)"));
    assert_eq!(seen.text(RecordKind::Stdout), "22\n");
    assert!(!seen.started().fresh);
    let ended = seen.ended();
    assert_eq!((ended.stdout_bytes, ended.stderr_bytes, ended.state_lost), (3, 0, false));
    assert!(matches!(ended.end, CellEnd::Finished(json) if json.contains("2")));
}

#[test]
fn an_error_is_an_exit_code() {
    let mut guest = Guest::new();
    let seen = guest.run(python("1 / 0"));
    assert!(seen.text(RecordKind::Error).contains("ZeroDivisionError"));
    assert_eq!(seen.exit, Some(Exit::Code(1)));
}

#[test]
fn cells_of_a_context_wait_for_their_turn() {
    let mut guest = Guest::new();
    let code = "import time; time.sleep(0.3); log = [1]";
    let first = guest.ask(python(code));
    let second = guest.ask(python("log.append(2)"));
    let third = guest.ask(python("print(log)"));
    assert_eq!(guest.finish(third).text(RecordKind::Stdout), "[1, 2]\n");
    assert!(guest.seen[&third].started().waited_ms >= 300);
    for earlier in [first, second] {
        assert_eq!(guest.seen[&earlier].exit, Some(Exit::Code(0)), "{earlier} ended after the last");
    }
}

#[test]
fn contexts_do_not_wait_for_each_other() {
    let mut guest = Guest::new();
    let slow = guest.ask(python("import time; time.sleep(30)"));
    guest.run(Cell { context: "other".into(), ..python("1") });
    assert_eq!(guest.seen[&slow].exit, None);
}

#[test]
fn output_and_displays_keep_their_order() {
    let mut guest = Guest::new();
    let code = "for i in range(5):\n  print('o%d' % i)\n  display(i)\nprint('last')";
    let seen = guest.run(python(code));
    let mut order = Vec::new();
    for (kind, payload) in &seen.records {
        match kind {
            RecordKind::Stdout => order.extend(payload.split(|byte| *byte == b'\n').map(<[u8]>::to_vec)),
            RecordKind::Display => order.push(b"display".to_vec()),
            _ => {}
        }
    }
    let order: Vec<_> = order.iter().filter(|word| !word.is_empty()).map(Vec::as_slice).collect();
    // Output after a display may overtake it; output before a display never comes after it.
    for number in 0..5 {
        let text = format!("o{number}").into_bytes();
        let printed = order.iter().position(|word| **word == text).unwrap();
        let displays = order.iter().enumerate().filter(|(_, word)| **word == b"display");
        let displayed = displays.map(|(at, _)| at).nth(number).unwrap();
        assert!(printed < displayed, "{order:?}");
    }
    assert_eq!(order.len(), 11);
}

#[test]
fn long_values_come_in_pieces() {
    let mut guest = Guest::new();
    let seen = guest.run(python("display({'text/plain': 'a' * 300_000}, raw=True)"));
    assert!(seen.kinds().iter().filter(|kind| **kind == RecordKind::Piece).count() >= 5);
    assert!(seen.bytes(RecordKind::Piece).len() + seen.bytes(RecordKind::Display).len() > 60_000);
}

#[test]
fn output_beyond_the_limit_is_counted_only() {
    let mut guest = Guest::new();
    let code = "import sys\nsys.stdout.write('x' * 3_000_000)\nsys.stderr.write('e' * 10)";
    let seen = guest.run(Cell { max_output: 1000, ..python(code) });
    assert_eq!(seen.bytes(RecordKind::Stdout), [b'x'; 1000]);
    assert_eq!(seen.bytes(RecordKind::Stderr), [b'e'; 10]);
    assert_eq!((seen.ended().stdout_bytes, seen.ended().stderr_bytes), (3_000_000, 10));
}

#[test]
fn what_leftovers_write_comes_before_the_next_cell() {
    let mut guest = Guest::new();
    let code = "import threading, os\n\
        threading.Timer(0.2, lambda: os.write(1, b'a' * 50_000 + b'later')).start()";
    assert_eq!(guest.run(python(code)).ended().background_bytes, 0);
    guest.idle(Duration::from_millis(500));
    let seen = guest.run(python("print('mine')"));
    assert_eq!(seen.kinds()[..2], [RecordKind::Background, RecordKind::Started]);
    let background = seen.bytes(RecordKind::Background);
    assert_eq!(background.len(), 16 * 1024);
    assert!(background.ends_with(b"alater"));
    assert_eq!(seen.ended().background_bytes, 50_005);
    assert_eq!(seen.text(RecordKind::Stdout), "mine\n");
}

#[test]
fn five_megabytes_of_code_arrive() {
    let mut guest = Guest::new();
    let code = format!("text = '{}'\nlen(text)", "y".repeat(5_000_000));
    let seen = guest.run(python(&code));
    assert!(seen.text(RecordKind::Result).contains("5000000"), "{:?}", seen.ended());
}

#[test]
fn variables_and_folder_are_the_cells_own() {
    let mut guest = Guest::new();
    let ask = "import os; print(os.environ.get('MINE'), os.getcwd())";
    let cell = Cell { env: vec!["MINE=a=b".into()], cwd: Some("/tmp".into()), ..python(ask) };
    assert_eq!(guest.run(cell).text(RecordKind::Stdout), "a=b /tmp\n");
    assert_eq!(guest.run(python(ask)).text(RecordKind::Stdout), "None /\n");
}

#[test]
fn a_reader_that_never_makes_room_costs_no_memory() {
    let mut guest = Guest::new();
    guest.grants = false;
    let code = "import sys\nfor i in range(1000):\n  sys.stdout.write('z' * 10_000)\n  display('d' * 50_000)";
    let stream = guest.ask(Cell { max_output: u64::MAX, ..python(code) });
    let mut most = 0;
    for _ in 0..40 {
        guest.idle(Duration::from_millis(25));
        most = most.max(guest.waiting_bytes());
    }
    assert!(most > 32 * 1024, "nothing had to wait: {most}");
    assert!(most < 256 * 1024, "{most} bytes wait");
    assert_eq!(guest.seen[&stream].exit, None);
    // Other contexts are not delayed by it, and it can still be ended.
    guest.grants = true;
    guest.run(Cell { context: "other".into(), ..python("1") });
    guest.send(stream, &ToGuest::Abandon);
    assert_eq!(guest.finish(stream).exit, Some(Exit::Code(1)));
    assert!(!guest.run(python("1")).started().fresh, "the state is gone");
}

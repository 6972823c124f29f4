//! Cells that are clumsy or hostile towards the Python driver: each gives a clear result, and the next cell
//! works.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

mod support;

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use support::python::{start, start_in};
use support::{Driver, Look};

/// Checks that the driver still runs a cell with output, a value and an error.
fn assert_sound(driver: &mut Driver) {
    let cell = driver.execute("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7");
    assert_eq!((cell.stdout.as_str(), cell.stderr.as_str()), ("out\n", "err\n"), "{cell:#?}");
    assert_eq!((cell.value(), cell.status()), (Some("42"), "ok"), "{cell:#?}");
    let cell = driver.execute("1/0");
    assert_eq!((cell.error(), cell.status()), (Some("ZeroDivisionError"), "error"), "{cell:#?}");
}

/// Runs a cell in a new driver, which must still work afterwards.
fn survives(code: &str) -> support::Cell {
    let mut driver = start();
    let cell = driver.execute(code);
    assert!(cell.ended.is_none(), "{cell:#?}");
    assert_sound(&mut driver);
    cell
}

#[test]
fn forked_child_sends_nothing_and_ends_with_the_cell() {
    let mut driver = start();
    let cell = driver.execute(
        "import os\npid = os.fork()\nif pid == 0:\n    print('child')\n    display('not sent')\nelse:\n    \
         print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n'value'",
    );
    assert_eq!(cell.value(), Some("'value'"), "{cell:#?}");
    assert!(cell.all('d').is_empty());
    assert_eq!(cell.stdout, "child\n'not sent'\n0\n");
    assert_sound(&mut driver);
}

#[test]
fn forked_child_that_fails_reports_it_on_standard_error() {
    let cell = survives(
        "import os\nif os.fork() == 0:\n    raise ValueError('in the child')\nos.waitstatus_to_exitcode(os.wait()[1])",
    );
    assert_eq!(cell.value(), Some("1"));
    assert!(
        cell.stderr.contains("ValueError: in the child") && !cell.stderr.contains("<driver>"),
        "{}",
        cell.stderr
    );
}

#[test]
fn child_that_lives_on_does_not_hold_the_channel() {
    let mut driver = start();
    driver.execute("import os, time\nif os.fork() == 0:\n    time.sleep(60)");
    let cell = driver.execute("os._exit(7)");
    assert_eq!(cell.ended.and_then(|status| status.code()), Some(7));
    assert!(driver.channel_closed());
}

#[test]
fn functions_of_cells_run_in_multiprocessing_and_pickle() {
    let cell = survives(
        "import multiprocessing, pickle\ndef square(n): return n * n\n\
         with multiprocessing.get_context('fork').Pool(2) as pool: squares = pool.map(square, [1, 2, 3])\n\
         (squares, pickle.loads(pickle.dumps(square)) is square)",
    );
    assert_eq!(cell.value(), Some("([1, 4, 9], True)"), "{cell:#?}");
}

#[test]
fn closed_descriptors_are_opened_again() {
    survives("import os\nos.close(1)\nos.close(2)");
    survives("import os\nos.closerange(0, 100)");
}

#[test]
fn redirected_descriptors_are_put_back() {
    survives("import os\nos.dup2(os.open('/dev/null', os.O_WRONLY), 1)\nos.system('echo gone')");
}

#[test]
fn streams_that_were_closed_or_replaced_are_made_again() {
    survives("import sys\nsys.stdout.close()\nsys.stderr.close()");
    survives("import sys\nsys.stdout.detach()");
    survives("import sys\nsys.stdout = sys.stderr = None");
    survives("import sys, io\nsys.stdout = io.StringIO()\nsys.stdout.close()");
    let cell = survives(
        "import sys\nclass Bad:\n    def write(self, text): raise KeyError('bad')\nsys.stdout = Bad()\nprint(1)",
    );
    assert_eq!(cell.error(), Some("KeyError"));
}

#[test]
fn rubbish_on_the_reply_descriptor_is_only_rubbish() {
    let cell = survives("import os\nos.write(4, b'f{\"status\":\"ok\"}')");
    assert_eq!((cell.garbage, cell.status()), (1, "ok"));
}

#[test]
fn programs_get_only_the_standard_descriptors() {
    let cell = start().execute("lines = !ls /proc/self/fd\nlen(lines)");
    // The fourth is the folder that ls reads.
    assert_eq!(cell.value(), Some("4"), "{cell:#?}");
}

#[test]
fn thread_may_go_on_printing() {
    let mut driver = start();
    driver.execute(
        "import threading, time\ngo = True\ndef work():\n    while go: print('tick'); time.sleep(0.01)\n\
         thread = threading.Thread(target=work)\nthread.start()",
    );
    driver.wait_for_output("tick");
    assert_eq!(driver.execute("1 + 1").value(), Some("2"));
    driver.execute("go = False\nthread.join()");
    driver.background();
    assert_sound(&mut driver);
}

#[test]
fn displays_of_threads_do_not_mix_their_pieces() {
    let cell = survives(
        "import threading\ndef work(c):\n    for _ in range(5): display({'text/plain': c * 200_000}, raw=True)\n\
         threads = [threading.Thread(target=work, args=c) for c in 'abcd']\n\
         for t in threads: t.start()\nfor t in threads: t.join()",
    );
    let displays = cell.all('d');
    assert_eq!(displays.len(), 20);
    for text in displays.iter().map(|shown| shown["data"]["text/plain"].text()) {
        assert!(text.len() == 200_000 && text.bytes().all(|byte| byte == text.as_bytes()[0]));
    }
}

#[test]
fn interrupt_ends_the_cell_and_keeps_the_state() {
    let mut driver = start();
    for code in [
        "x = 1\nprint('on')\nwhile True: pass",
        "import time\nprint('on')\ntime.sleep(60)",
        "!echo on; sleep 60",
    ] {
        driver.begin(code, "", "", &[]);
        driver.wait_for_output("on");
        driver.interrupt();
        let cell = driver.finish();
        assert_eq!((cell.error(), cell.status()), (Some("KeyboardInterrupt"), "error"), "{code}: {cell:#?}");
    }
    assert_eq!(driver.execute("x").value(), Some("1"));
}

#[test]
fn interrupt_is_ignored_while_idle() {
    let mut driver = start();
    for _ in 0..3 {
        driver.interrupt();
        sleep(Duration::from_millis(20));
        assert_sound(&mut driver);
    }
}

#[test]
fn interrupts_at_any_moment_leave_one_end_per_cell() {
    let mut driver = start();
    for round in 0..150_u64 {
        driver.begin("display({'text/html': 'x' * 300_000}, raw=True)\n[1] * 9", "", "", &[]);
        sleep(Duration::from_micros(round * 20));
        driver.interrupt();
        let cell = driver.finish();
        assert!(cell.error().is_none_or(|name| name == "KeyboardInterrupt"), "{round}: {cell:#?}");
        assert_eq!(cell.all('f').len(), 1, "{round}");
    }
    assert_sound(&mut driver);
}

#[test]
fn interrupt_works_after_a_cell_that_changed_the_handling() {
    let mut driver = start();
    driver.execute("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)");
    driver.execute("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])");
    driver.begin("print('on')\nwhile True: pass", "", "", &[]);
    driver.wait_for_output("on");
    driver.interrupt();
    assert_eq!(driver.finish().error(), Some("KeyboardInterrupt"));
}

#[test]
fn directory_of_a_cell_ends_with_it_and_chdir_stays() {
    let mut driver = start();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    driver.execute("import os\nos.chdir('/usr')");
    let inside = driver.execute_with("os.getcwd()", path, "", &[]);
    assert_eq!(inside.value(), Some(format!("'{path}'").as_str()));
    assert_eq!(driver.execute("os.getcwd()").value(), Some("'/usr'"));
    driver.execute_with("os.chdir('/')\n1/0", path, "", &[]);
    assert_eq!(driver.execute("os.getcwd()").value(), Some("'/usr'"));
}

#[test]
fn missing_directory_is_an_error_and_the_code_does_not_run() {
    let mut driver = start();
    let cell = driver.execute_with("ran = True", "/does/not/exist", "", &[]);
    assert_eq!(cell.error(), Some("FileNotFoundError"));
    assert!(cell.one('e')["value"].text().contains("/does/not/exist"), "{cell:#?}");
    assert_eq!(driver.execute("ran").error(), Some("NameError"));
}

#[test]
fn environment_of_a_cell_ends_with_it_and_is_never_code() {
    let mut driver = start();
    driver.execute("import os\nos.environ['KEPT'] = 'before'");
    let env = ["KEPT=during", "NEW=a'\"\n$(x)=b", "=nameless", "empty="];
    let code = "lines = !printf %s \"$NEW\"\n(os.environ['KEPT'], os.environ['NEW'], lines)";
    let cell = driver.execute_with(code, "", "", &env);
    assert_eq!(cell.value(), Some(r#"('during', 'a\'"\n$(x)=b', ['a\'"', '$(x)=b'])"#), "{cell:#?}");
    let after = driver.execute("(os.environ['KEPT'], 'NEW' in os.environ, 'empty' in os.environ)");
    assert_eq!(after.value(), Some("('before', False, False)"));
}

#[test]
fn patched_python_does_not_reach_the_driver() {
    survives(
        "import builtins, os\nbuiltins.len = builtins.open = builtins.isinstance = None\nos.getpid = os.write = None",
    );
    survives("import sys\nsys.settrace(lambda *_: 1/0)");
    survives("import sys\nsys.setrecursionlimit(sys.getrecursionlimit() and 40)");
    survives("import sys\nsys.modules.clear()");
    survives("globals().clear()");
    survives(
        "import gc\ngc.disable()\nimport signal\nsignal.alarm(0)\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    );
}

#[test]
fn odd_exceptions_are_reported() {
    let cell = survives(
        "class E(Exception):\n    def __str__(self): raise KeyError\n    def __bool__(self): return False\nraise E",
    );
    assert_eq!((cell.error(), cell.status()), (Some("E"), "error"));
    let cell = survives("raise BaseException('base')");
    assert_eq!(cell.error(), Some("BaseException"));
    let cell =
        survives("a = ValueError('a')\na.__context__ = b = ValueError('b')\nb.__context__ = a\nraise a");
    assert_eq!(cell.error(), Some("ValueError"));
}

#[test]
fn an_exception_whose_text_raises_anything_does_not_end_the_driver() {
    for raised in ["KeyboardInterrupt", "SystemExit", "GeneratorExit"] {
        let code = format!("class E(Exception):\n    def __str__(self): raise {raised}\nraise E");
        let cell = survives(&code);
        assert_eq!((cell.error(), cell.status()), (Some("E"), "error"), "{raised}");
    }
    let cell = survives(
        "import os\nclass E(Exception):\n    def __str__(self): raise KeyboardInterrupt\n\
         if os.fork() == 0:\n    raise E\nos.waitstatus_to_exitcode(os.wait()[1])",
    );
    assert!(cell.value() == Some("1") && !cell.stderr.contains("<driver>"), "{cell:#?}");
}

#[test]
fn a_damaged_interpreter_says_so() {
    let mut driver = start();
    let sound = driver.execute("1/0");
    assert!(!sound.one('f').has("damage"), "{sound:#?}");
    let cell = driver.execute("import builtins\nbuiltins.__import__ = None\nimport json");
    assert!(cell.one('f')["damage"].text().contains("built-ins are replaced (__import__)"), "{cell:#?}");
    assert!(!driver.execute("6 * 7").one('f').has("damage"));

    let mut driver = start();
    driver.execute("import _ast\n_ast.Expression = None");
    let cell = driver.execute("6 * 7");
    assert!(cell.one('f')["damage"].text().contains("cannot run any code (TypeError)"), "{cell:#?}");
}

#[test]
fn an_interpreter_without_memory_works_or_says_that_it_is_damaged() {
    let mut driver = start();
    driver.execute("import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))");
    let cell = driver.execute("x = list(range(10_000_000))");
    assert_eq!(cell.error(), Some("MemoryError"), "{cell:#?}");
    for _ in 0..50 {
        let cell = driver.execute("6 * 7");
        assert!(cell.value() == Some("42") || cell.one('f').has("damage"), "{cell:#?}");
    }
}

#[test]
fn odd_code_is_an_error() {
    let mut driver = start();
    assert!(driver.execute("x = 1\0").error().is_some());
    assert!(driver.execute(&"(".repeat(100_000)).error().is_some());
    assert_eq!(driver.execute("").status(), "ok");
    assert_eq!(driver.execute("\u{feff}1\r\n2\r\n").value(), Some("2"));
    assert_sound(&mut driver);
}

#[test]
fn deaths_are_seen_at_once() {
    let exited = start().execute("import os\nos._exit(9)");
    assert_eq!(exited.ended.and_then(|status| status.code()), Some(9));
    let killed = start().execute("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)");
    assert!(killed.ended.is_some_and(|status| status.code().is_none()));
}

#[test]
fn end_of_requests_is_a_quiet_end() {
    let mut driver = start();
    driver.execute(
        "import atexit, threading\natexit.register(print, 'bye')\nthreading.Thread(target=threading.Event().wait).start()",
    );
    assert_eq!(driver.close().code(), Some(0));
    assert_eq!(driver.background(), ("bye\n".to_owned(), String::new()));
}

#[test]
fn users_python_variables_stay_in_force() {
    let mut driver = start_in(Path::new("/"), &[("PYTHONOPTIMIZE", "1")]);
    driver.hello();
    assert_eq!(driver.execute("assert False\n__debug__").value(), Some("False"));
}

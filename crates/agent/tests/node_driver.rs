//! Tests of the Node driver, which is run natively with the agent's protocol.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

mod support;

use std::fs;
use std::path::Path;
use std::time::Duration;

use support::node::{start, start_in};
use support::{Driver, Look};

/// The value of a cell's last expression, which must succeed.
fn value(driver: &mut Driver, code: &str) -> String {
    let cell = driver.execute(code);
    assert_eq!(cell.status(), "ok", "{code}: {cell:#?}");
    cell.value().unwrap_or("nothing").to_owned()
}

/// A folder with packages of both kinds.
fn folder_with_packages() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in [
        ("node_modules/old/index.js", "exports.name = 'old';"),
        ("node_modules/new/package.json", r#"{"name":"new","type":"module","exports":"./it.js"}"#),
        ("node_modules/new/it.js", "export const name = 'new'; export default 7;"),
        ("local.mjs", "export const name = 'local';"),
        ("node_modules/amaro/index.js", STRIPPER),
    ] {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

/// A stand-in for the package that strips types where Node cannot: it handles the code in these tests.
const STRIPPER: &str = r"
exports.transformSync = (code, { mode }) => {
  if (code.includes('const x: =')) throw '  x Unexpected token `=`\n   ,----\n 1 | const x: = 3;\n   `----';
  if (mode === 'strip-only' && code.includes('enum')) throw 'enum is not supported';
  return { code: code.replace(/: number/g, '        ').replace('enum E { A }', 'var E = { A: 0 };') };
};";

#[test]
fn values_of_last_expressions_come_as_text_and_json() {
    let mut driver = start();
    let cell = driver.execute("({ a: [1, null], b: 'x' })");
    let data = &cell.one('r')["data"];
    assert_eq!(data["text/plain"].text(), "{ a: [ 1, null ], b: 'x' }");
    assert_eq!(data["application/json"]["a"].items()[0].number(), 1.0);
    for (code, text) in [
        ("1 + 1", "2"),
        ("{ a: 1 }", "{ a: 1 }"),
        ("'text'", "'text'"),
        ("null", "null"),
        ("undefined", "nothing"),
        ("10n", "10n"),
        ("if (true) { 5 }", "5"),
        ("new Map([[1, 2]])", "Map(1) { 1 => 2 }"),
        ("await 1, 2", "2"),
        ("const p = await Promise.resolve(3); p", "3"),
        ("// nothing", "nothing"),
    ] {
        assert_eq!(value(&mut driver, code), text, "{code}");
    }
}

#[test]
fn names_may_be_declared_again_in_any_form() {
    let mut driver = start();
    for name in ["x", "fetch", "crypto"] {
        for (declaration, result) in [
            ("const NAME = 1; NAME", "1"),
            ("let NAME = 2; NAME", "2"),
            ("class NAME {}; typeof NAME", "'function'"),
            ("function NAME() { return 4 }; NAME()", "4"),
            ("var NAME = 5; NAME", "5"),
            ("const { NAME } = { NAME: 6 }; NAME", "6"),
            ("let NAME; NAME", "nothing"),
        ] {
            assert_eq!(
                value(&mut driver, &declaration.replace("NAME", name)),
                result,
                "{declaration} as {name}"
            );
        }
    }
    assert_eq!(value(&mut driver, "let n = 1; { let n = 2 }; n"), "1");
}

#[test]
fn packages_are_found_from_the_current_directory() {
    let folder = folder_with_packages();
    let mut driver = start();
    let home = folder.path().to_str().unwrap();
    for (code, result) in [
        ("require('old').name", "'old'"),
        ("import seven, { name as other } from 'new'; [seven, other]", "[ 7, 'new' ]"),
        ("import * as all from 'new';\nall.name", "'new'"),
        ("(await import('./local.mjs')).name", "'local'"),
        ("import {\n  join\n} from 'node:path'; new Error().stack.match(/cell-\\d+:(\\d)/)[1]", "'3'"),
        ("export const exported = 8; exported", "8"),
        ("import.meta.dirname === process.cwd()", "true"),
    ] {
        let cell = driver.execute_with(code, home, "", &[]);
        assert_eq!(cell.value(), Some(result), "{code}: {cell:#?}");
    }
    assert_eq!(value(&mut driver, "join('a', 'b') + seven"), "'a/b7'");
    assert_eq!(
        driver.execute("require('old')").error(),
        Some("Error"),
        "only for the cell with that directory"
    );
}

#[test]
fn types_are_taken_out_and_enums_translated() {
    let folder = folder_with_packages();
    let mut driver = start_in(folder.path());
    for (code, result) in
        [("const x: number = 41; x + 1", "42"), ("enum E { A }\nE.A", "0"), ("let x: number = 1; x", "1")]
    {
        let cell = driver.execute_with(code, "", "typescript", &[]);
        assert_eq!(cell.value(), Some(result), "{code}: {cell:#?}");
    }
    let cell = driver.execute_with("const x: = 3;", "", "typescript", &[]);
    assert_eq!(cell.error(), Some("SyntaxError"));
    assert!(cell.traceback().contains("const x: = 3;"), "{cell:#?}");
    assert_eq!(
        driver.execute("const x: number = 1").error(),
        Some("SyntaxError"),
        "without the flag it is JavaScript"
    );
}

#[test]
fn typescript_without_a_stripper_says_what_is_missing() {
    let mut driver = start();
    let cell = driver.execute_with("const x: number = 41; x + 1", "", "typescript", &[]);
    match cell.error() {
        None => assert_eq!(cell.value(), Some("42"), "this machine can"),
        Some(name) => {
            assert_eq!(name, "TypeScriptUnavailable");
            assert!(cell.one('e')["value"].text().contains("amaro"), "{cell:#?}");
        }
    }
}

#[test]
fn output_is_ordered_also_with_that_of_children() {
    let mut driver = start();
    let code = "console.log(1); require('child_process').execSync('echo 2', { stdio: 'inherit' }); console.log(3); console.error('e')";
    let cell = driver.execute(code);
    assert_eq!((cell.stdout.as_str(), cell.stderr.as_str()), ("1\n2\n3\n", "e\n"));
    assert_eq!(
        driver.execute("console.log('x'.repeat(1e6)); process.stdout.write('end')").stdout.len(),
        1_000_004
    );
}

#[test]
fn displays_come_in_order_and_are_bounded() {
    let mut driver = start();
    let cell = driver.execute(
        "display({ 'text/html': '<b>', 'text/plain': 'b' }); display.svg('<svg/>'); display(Buffer.from('89504e470d0a1a0a00', 'hex')); \
         display.html('x'.repeat(9e6)); display.png(Buffer.alloc(100000)); 1",
    );
    let shown = cell.all('d');
    assert_eq!(shown[0]["data"]["text/html"].text(), "<b>");
    assert_eq!(shown[1]["data"]["image/svg+xml"].text(), "<svg/>");
    assert_eq!(shown[2]["data"]["image/png"].text(), "iVBORw0KGgoA");
    assert_eq!(shown[3]["omitted"].items()[0]["bytes"].number(), 9e6);
    assert_eq!(shown[4]["data"]["image/png"].text().len(), 133_336);
    assert_eq!(driver.execute("for (let i = 0; i < 100; i++) display(i)").all('d').len(), 65);
}

#[test]
fn huge_values_are_cut_and_their_size_is_reported() {
    let mut driver = start();
    for code in ["'x'.repeat(5e7)", "'é'.repeat(1e6)"] {
        let cell = driver.execute(code);
        let result = cell.one('r');
        assert!(result["data"]["text/plain"].text().len() <= 64 * 1024, "{code}");
        assert!(result["omitted"].items()[0]["bytes"].number() >= 2e6, "{code}");
    }
    assert!(value(&mut driver, "Array(1e6).fill(7)").contains("more items"));
    assert!(
        value(&mut driver, "Object.fromEntries(Array.from({ length: 1e5 }, (_, i) => [i + 'k', i]))").len()
            < 64 * 1024
    );
}

#[test]
fn errors_show_the_cells_lines_and_nothing_of_the_driver() {
    let mut driver = start();
    let cell = driver.execute("function f() { null.x }\n\nf()");
    assert_eq!(cell.error(), Some("TypeError"));
    let trace = cell.traceback();
    assert!(trace.contains("at f (cell-1:1:") && trace.contains("cell-1:3:"), "{trace}");
    let cell = driver.execute("await Promise.reject(new Error('outer', { cause: new Error('inner') }))");
    let trace = cell.traceback();
    assert!(trace.contains("outer") && trace.contains("inner"), "{trace}");
    assert!(!trace.contains("node:") && !trace.contains("driver"), "{trace}");
    let cell = driver.execute("1;\nlet a = ;");
    assert_eq!(cell.error(), Some("SyntaxError"));
    assert!(cell.traceback().contains("let a = ;\n            ^"), "{cell:#?}");
    assert_eq!(driver.execute("import x from").error(), Some("SyntaxError"));
    assert_eq!(driver.execute("throw 3").one('e')["value"].text(), "3");
    assert_eq!(driver.execute("(function f() { f() })()").error(), Some("RangeError"));
    assert_eq!(
        driver
            .execute("({ [Symbol.for('nodejs.util.inspect.custom')]() { throw new Error('bad') } })")
            .error(),
        Some("Error")
    );
    assert_eq!(value(&mut driver, "'on'"), "'on'");
}

#[test]
fn an_interrupt_ends_loops_and_waits_and_keeps_the_state() {
    let mut driver = start();
    value(&mut driver, "let kept = 1");
    for code in [
        "while (true) {}",
        "await 1; while (true) {}",
        "await new Promise(r => setTimeout(r, 5)); while (true) {}",
        "await new Promise(() => {})",
        "setTimeout(() => { while (true) {} }, 5); await new Promise(() => {})",
        "process.nextTick(() => { while (true) {} }); await new Promise(() => {})",
        "require('child_process').execSync('sleep 30')",
        "/(a+)+b/.test('a'.repeat(40))",
    ] {
        driver.begin(&format!("console.log('go');\n{code};\nconsole.log('not here')"), "", "", &[]);
        driver.wait_for_output("go");
        // The driver does not survive an interrupt in the first moments of a cell, while its own code still
        // runs.
        std::thread::sleep(Duration::from_secs(1));
        let cell = driver.finish_interrupted();
        // A child is killed by the same signal, and its end may be noticed first.
        let by_child = code.contains("execSync") && format!("{cell:?}").contains("signal: 'SIGINT'");
        let expected = if by_child { "Error" } else { "Interrupted" };
        assert_eq!(cell.error(), Some(expected), "{code}: {cell:#?}");
        assert_eq!(cell.stdout, "", "{code}");
        assert!(cell.took < Duration::from_secs(20), "{code} took {:?}", cell.took);
        assert_eq!(value(&mut driver, "await new Promise(r => setTimeout(r, 1)); kept"), "1", "after {code}");
    }
}

#[test]
fn an_unresolvable_promise_may_be_collected() {
    let mut driver = start();
    let collect = "require('v8').setFlagsFromString('--expose-gc'); setInterval(require('vm').runInNewContext('gc'), 5).unref(); 0";
    value(&mut driver, collect);
    driver.begin("console.log('go'); await new Promise(() => {})", "", "", &[]);
    driver.wait_for_output("go");
    std::thread::sleep(Duration::from_millis(200));
    driver.interrupt();
    assert_eq!(driver.finish().error(), Some("Interrupted"));
    assert_eq!(value(&mut driver, "await new Promise(r => setTimeout(r, 50)); 1"), "1");
}

#[test]
fn an_interrupt_between_cells_is_nothing_also_without_listeners() {
    let mut driver = start();
    value(&mut driver, "process.removeAllListeners(); 1");
    std::thread::sleep(Duration::from_millis(200));
    driver.interrupt();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(value(&mut driver, "1 + 1"), "2");
}

#[test]
fn timers_go_on_between_cells() {
    let mut driver = start();
    value(&mut driver, "globalThis.ticks = 0; setInterval(() => ticks++, 1).unref(); 0");
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!(value(&mut driver, "ticks > 2"), "true");
}

#[test]
fn uncaught_errors_are_reported_and_end_nothing() {
    let mut driver = start();
    let cell = driver.execute("Promise.reject(new Error('left alone')); 1");
    assert!(cell.stderr.contains("Uncaught Error: left alone"), "{cell:#?}");
    assert_eq!(cell.value(), Some("1"));
    let cell = driver.execute(
        "setTimeout(() => { throw new Error('in a timer') }, 1); await new Promise(r => setTimeout(r, 50))",
    );
    assert!(cell.stderr.contains("in a timer"), "{cell:#?}");
    assert_eq!(value(&mut driver, "2"), "2");
}

#[test]
fn closed_outputs_come_back() {
    let mut driver = start();
    driver.execute("process.stdout.end('bye'); process.stdout.destroy(); process.stderr.destroy(); 0");
    assert_eq!(driver.execute("console.log('back')").stdout, "back\n");
    driver.execute(
        "require('fs').closeSync(1); require('fs').closeSync(2); require('fs').openSync('/dev/null'); 0",
    );
    let cell = driver.execute("console.log('out'); console.error('err'); require('child_process').execSync('echo child', { stdio: 'inherit' })");
    assert_eq!((cell.stdout.as_str(), cell.stderr.as_str()), ("out\nchild\n", "err\n"));
}

#[test]
fn garbage_on_the_replies_is_only_garbage() {
    let mut driver = start();
    let cell = driver.execute("require('fs').writeSync(4, 'nonsense'); 1");
    assert_eq!((cell.garbage, cell.value()), (1, Some("1")));
    assert_eq!(value(&mut driver, "JSON.stringify = null; 1"), "1");
    assert_eq!(value(&mut driver, "[1]"), "[ 1 ]");
}

#[test]
fn children_inherit_no_descriptor_of_the_driver() {
    let mut driver = start();
    let listed = value(
        &mut driver,
        "require('child_process').execSync('for n in 3 4 5; do test -e /proc/self/fd/$n && echo $n; done; true').toString()",
    );
    assert_eq!(listed, "''");
}

#[test]
fn environment_and_directory_are_for_one_cell() {
    let mut driver = start();
    let cell = driver.execute_with("[process.cwd(), process.env.ODD]", "/tmp", "", &["ODD=a=b'\""]);
    assert_eq!(cell.value(), Some("[ '/tmp', `a=b'\"` ]"));
    assert_eq!(value(&mut driver, "[process.cwd(), process.env.ODD]"), "[ '/', undefined ]");
    assert_eq!(driver.execute_with("1", "/no/such/folder", "", &[]).error(), Some("Error"));
    assert_eq!(value(&mut driver, "process.chdir('/usr'); 0"), "0");
    assert_eq!(value(&mut driver, "process.cwd()"), "'/usr'");
}

#[test]
fn exit_ends_the_process_at_once() {
    let mut driver = start_in(Path::new("/tmp"));
    let cell = driver.execute("process.exit(4)");
    assert_eq!(cell.ended.unwrap().code(), Some(4));
    assert_eq!(cell.stderr, "");
    assert!(start().close().success(), "the end of the requests is an orderly end");
}

#[test]
fn five_megabytes_of_code_run() {
    let mut driver = start();
    let code = format!("const big = '{}'; big.length", "y".repeat(5 << 20));
    assert_eq!(value(&mut driver, &code), (5 << 20).to_string());
    assert_eq!(value(&mut driver, "big.length"), (5 << 20).to_string());
}

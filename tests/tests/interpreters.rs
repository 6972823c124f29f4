//! Code in the interpreters of a kept sandbox, and what careless or hostile code does to them: each piece gets a clear
//! answer, and the next one works.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeMap;

use bathy_tests::kept::{Home, until};
use bathy_tests::patient_seconds;
use serde_json::{Value, json};

const MEMORY: [&str; 2] = ["--memory", "384M"];

/// A sandbox called `box` whose interpreters are asked.
struct Box {
    home: Home,
}

impl Box {
    fn new() -> Self {
        let home = Home::new();
        home.started("box", &MEMORY);
        Self { home }
    }

    /// Runs one cell and returns the result of `--json`.
    #[track_caller]
    fn cell(&self, language: &str, options: &[&str], code: &str) -> Value {
        let arguments =
            [&["code", "--json", "--sandbox", "box", "--lang", language], options, &["-"]].concat();
        let ran = self.home.run_with(&arguments, code.as_bytes());
        let result: Value =
            serde_json::from_str(&ran.stdout).unwrap_or_else(|error| unreachable!("{error}: {ran:?}"));
        assert_eq!(result["exit_code"], json!(ran.code), "{ran:?}");
        result
    }

    #[track_caller]
    fn python(&self, code: &str) -> Value {
        self.cell("python", &[], code)
    }

    /// A cell that has to end without any trouble: the text of its value.
    #[track_caller]
    fn value(&self, language: &str, code: &str) -> String {
        let result = self.cell(language, &[], code);
        assert_eq!(result["exit_code"], 0, "{code}: {result:#}");
        text_of(&result)
    }
}

/// The text of the value of the last expression.
#[track_caller]
fn text_of(result: &Value) -> String {
    let results = result["results"].as_array().unwrap();
    let main = results.iter().find(|result| result["is_main_result"] == true);
    main.and_then(|result| result["data"]["text/plain"].as_str()).unwrap_or_default().to_owned()
}

fn stdout(result: &Value) -> &str {
    result["stdout"]["text"].as_str().unwrap()
}

#[test]
fn python_keeps_its_state_and_shows_values_output_and_errors() {
    let sandbox = Box::new();
    let first = sandbox.python("import os, sys\nx = 20\nprint('out'); print('err', file=sys.stderr)\nx + 1");
    assert_eq!((stdout(&first), first["stderr"]["text"].as_str().unwrap()), ("out\n", "err\n"), "{first:#}");
    assert_eq!((text_of(&first).as_str(), &first["fresh"], &first["count"]), ("21", &json!(true), &json!(1)));
    let second = sandbox.python("x * 2");
    assert_eq!(
        (text_of(&second).as_str(), &second["fresh"], &second["count"]),
        ("40", &json!(false), &json!(2))
    );

    // Children and C code write where Python does, in order.
    let mixed = sandbox.python(
        "import subprocess, ctypes\nprint('one')\nsubprocess.run(['echo', 'two'])\nos.write(1, b'three\\n')\nlibc = ctypes.CDLL(None)\nlibc.puts(b'four'); libc.fflush(None)\n!echo five\nNone",
    );
    assert_eq!(stdout(&mixed), "one\ntwo\nthree\nfour\nfive\n", "{mixed:#}");

    let error = sandbox.python("def inner():\n    return 1 / 0\n\ninner()");
    assert_eq!((&error["error"]["name"], &error["exit_code"]), (&json!("ZeroDivisionError"), &json!(1)));
    let trace = error["error"]["traceback"].as_array().unwrap();
    let trace: Vec<&str> = trace.iter().filter_map(Value::as_str).collect();
    let trace = trace.join("\n");
    assert!(trace.contains("return 1 / 0") && trace.contains("inner()"), "{trace}");
    assert!(!trace.contains("exec(") && !trace.contains("bathysphere"), "our own frames show: {trace}");

    assert_eq!(sandbox.value("python", "import asyncio\nawait asyncio.sleep(0, 'awaited')"), "'awaited'");
    assert_eq!(sandbox.value("python", "%cd /tmp\nos.getcwd()"), "'/tmp'");
    assert_eq!(stdout(&sandbox.python("%%bash\nfor i in 1 2; do echo $i; done")), "1\n2\n");
    let asked = sandbox.python("input('name? ')");
    assert!(asked["error"]["value"].as_str().unwrap().contains("input()"), "{asked:#}");
    assert_eq!(sandbox.value("python", "x"), "20");
}

#[test]
fn variables_and_folder_of_one_cell_are_not_code_and_not_kept() {
    let sandbox = Box::new();
    let tricky = "it's \"$(touch /tmp/injected)\"\n'); import os; os._exit(9) #";
    let setting = format!("TRICKY={tricky}");
    let code = "import os\nos.environ['TRICKY'], os.getcwd()";
    for language in ["python", "bash", "javascript"] {
        let code = match language {
            "python" => "import os\nprint(os.environ['TRICKY'], end='')\nprint(os.getcwd())",
            "bash" => "printf %s \"$TRICKY\"; pwd",
            _ => "process.stdout.write(process.env.TRICKY); console.log(process.cwd())",
        };
        let result = sandbox.cell(language, &["-e", &setting, "--workdir", "/usr"], code);
        assert_eq!(stdout(&result), format!("{tricky}/usr\n"), "{language}: {result:#}");
    }
    let after = sandbox.python(code);
    assert_eq!(after["error"]["name"], "KeyError", "{after:#}");
    assert_eq!(
        sandbox.value("python", "os.getcwd(), os.path.exists('/tmp/injected')"),
        "('/home/user', False)"
    );
}

#[test]
fn tables_and_plots_come_as_what_they_are() {
    let sandbox = Box::new();
    let table = sandbox.python("import pandas as pd\npd.DataFrame({'a': range(5000), 'b': 'x'})");
    let bundle = &table["results"][0]["data"];
    assert!(bundle["text/html"].as_str().unwrap().contains("<table"), "{table:#}");
    assert!(bundle["application/json"].to_string().len() < 500_000);
    assert!(bundle["text/plain"].as_str().unwrap().contains("5000 rows"));

    let plot = sandbox.cell(
        "python",
        &["--timeout", &patient_seconds(120)],
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.figure()\nplt.plot([2, 1])\nNone",
    );
    let images: Vec<&str> = plot["results"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|shown| shown["data"]["image/png"].as_str())
        .collect();
    assert_eq!(images.len(), 2, "each open figure once: {}", plot["results"]);
    assert!(images.iter().all(|image| image.starts_with("iVBORw0KGgo")));

    let huge = sandbox.cell(
        "python",
        &["--timeout", &patient_seconds(120)],
        "fig = plt.figure(figsize=(200, 200), dpi=100)\nplt.plot([1])\n'after'",
    );
    assert_eq!((text_of(&huge).as_str(), &huge["state_lost"]), ("'after'", &json!(false)), "{huge:#}");
    let reported = huge["results"].to_string();
    assert!(reported.contains("20000") && !reported.contains("iVBORw0KGgo"), "{reported}");

    let several = sandbox.python(
        "class Both:\n    def _repr_html_(self): return '<b>x</b>'\n    def _repr_latex_(self): return '$x$'\n    def _repr_markdown_(self): return '*x*'\ndisplay(Both()); display('second')\nBoth()",
    );
    let shown = several["results"].as_array().unwrap();
    assert_eq!(shown.len(), 3, "{several:#}");
    let forms: Vec<&str> = shown[2]["data"].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(forms, ["text/html", "text/latex", "text/markdown", "text/plain"]);
}

/// What a cell is expected to leave.
enum After {
    /// The variable is still there.
    Kept,
    /// The interpreter is a new one, and the reason is reported.
    Lost(&'static str),
}

#[test]
fn whatever_a_cell_does_to_its_interpreter_the_next_one_works() {
    use After::{Kept, Lost};
    let sandbox = Box::new();
    let (two, eight, long) = (patient_seconds(2), patient_seconds(8), patient_seconds(120));
    let (endless, flood, long) = (["--timeout", &two], ["--timeout", &eight], ["--timeout", &long]);
    type Expected = fn(&Value) -> bool;
    let rows: [(&str, &[&str], &str, Expected, After); 17] = [
        (
            "an endless loop that prints",
            &flood,
            "while True: print('x' * 1_000_000)",
            |result| {
                result["exit_code"] == 124
                    && result["stdout"]["truncated"] == true
                    && result["stdout"]["bytes"].as_u64() > Some(16 << 20)
            },
            Kept,
        ),
        ("an endless loop", &endless, "while True: pass", |result| result["exit_code"] == 124, Kept),
        (
            "a loop that swallows the interrupt",
            &endless,
            "import time\nwhile True:\n    try:\n        time.sleep(9)\n    except BaseException:\n        pass",
            |result| result["exit_code"] == 124 && result["state_lost"] == true,
            Lost("killed"),
        ),
        (
            "a huge value",
            &[],
            "'x' * 50_000_000",
            |result| {
                let omitted = result["results"][0]["omitted"][0]["bytes"].as_u64();
                text_of(result).len() < 100_000 && omitted >= Some(50_000_000)
            },
            Kept,
        ),
        (
            "a recursion",
            &[],
            "def f(): return f()\nf()",
            |result| result["error"]["name"] == "RecursionError",
            Kept,
        ),
        (
            "a crash",
            &[],
            "import ctypes; ctypes.string_at(0)",
            |result| result["exit_code"] == 139 && result["message"].as_str().unwrap().contains("SIGSEGV"),
            Lost("signal 11"),
        ),
        ("an exit", &[], "import sys; sys.exit(3)", |result| result["error"]["name"] == "SystemExit", Kept),
        ("a hard exit", &[], "import os; os._exit(3)", |result| result["exit_code"] == 3, Lost("code 3")),
        (
            "a kill from within",
            &[],
            "import os; os.kill(os.getpid(), 9)",
            |result| result["exit_code"] == 137 && !result["message"].as_str().unwrap().contains("memory"),
            Lost("signal 9"),
        ),
        (
            "a kill of everything",
            &[],
            "import os; os.kill(-1, 9)\nos.kill(os.getpid(), 9)",
            |result| result["exit_code"] == 137,
            Lost("signal 9"),
        ),
        (
            "all memory",
            &long,
            "held = []\nwhile True: held.append(bytearray(b'x' * 4_000_000))",
            |result| result["message"].as_str().is_some_and(|text| text.contains("out of memory")),
            Lost("memory"),
        ),
        (
            "words for the protocol",
            &[],
            "import os; os.write(4, b'f{}') and os.write(4, bytes(40000))",
            |result| result["exit_code"] == 0,
            Kept,
        ),
        (
            "a closed protocol",
            &[],
            "import os; os.closerange(3, 70_000)",
            |result| result["state_lost"] == true && result["message"].as_str().unwrap().contains("state"),
            Lost("ended with code 1"),
        ),
        (
            "closed output",
            &[],
            "import os; os.close(1); os.close(2)",
            |result| result["state_lost"] == false,
            Kept,
        ),
        (
            "replaced output",
            &[],
            "import sys; sys.stdout = sys.stderr = None",
            |result| result["exit_code"] == 0,
            Kept,
        ),
        (
            "a fork",
            &[],
            "import os\nchild = os.fork()\nprint('both')\nif child: os.waitpid(child, 0)\n'done'",
            |result| stdout(result) == "both\nboth\n" && text_of(result) == "'done'",
            Kept,
        ),
        ("five megabytes of code", &long, "", |result| text_of(result) == "5000000", Kept),
    ];
    for (what, options, code, expected, after) in rows {
        let large = format!("len('''{}''')", "y".repeat(5_000_000));
        let code = if code.is_empty() { &large } else { code };
        sandbox.python("marker = 'here'");
        let result = sandbox.cell("python", options, code);
        let shown: String = format!("{result:#}").chars().take(3000).collect();
        assert!(expected(&result), "{what}: {shown}");
        let next = sandbox
            .python("import sys\nprint('printed'); print('err', file=sys.stderr)\nglobals().get('marker')");
        let found = (stdout(&next), next["stderr"]["text"].as_str().unwrap(), text_of(&next));
        match after {
            Kept => assert_eq!(found, ("printed\n", "err\n", "'here'".to_owned()), "after {what}: {next:#}"),
            Lost(why) => {
                assert_eq!(found, ("printed\n", "err\n", String::new()), "after {what}: {next:#}");
                assert_eq!(next["fresh"], true);
                let lost = next["lost"].as_str().unwrap_or_default();
                assert!(lost.contains(why), "after {what}: {lost:?}");
            }
        }
    }
}

#[test]
fn a_damaged_interpreter_says_so_and_is_restarted() {
    let sandbox = Box::new();
    let damaged = |result: &Value| {
        let message = result["message"].as_str().unwrap_or_default();
        message.contains("damaged") && message.contains("--restart")
    };
    sandbox.python("import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))");
    sandbox.python("x = list(range(10_000_000))");
    let restarted = sandbox.cell("python", &["--restart"], "6 * 7");
    assert_eq!((text_of(&restarted).as_str(), &restarted["fresh"]), ("42", &json!(true)), "{restarted:#}");
    assert!(restarted["lost"].as_str().unwrap().contains("restarted"), "{restarted:#}");
    sandbox.python("import _ast\n_ast.Expression = None");
    let broken = sandbox.python("6 * 7");
    assert!(damaged(&broken), "{broken:#}");
    assert_eq!(text_of(&sandbox.cell("python", &["--restart"], "6 * 7")), "42");
    // A context that is not there yet has nothing to lose.
    assert_eq!(text_of(&sandbox.cell("javascript", &["--restart"], "6 * 7")), "42");
    sandbox.home.fails(&["code", "--restart", "-c", "1"], 125);

    // The text of an exception may raise anything.
    sandbox.python("marker = 1");
    let odd = sandbox.python("class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise E");
    assert_eq!((&odd["error"]["name"], &odd["state_lost"]), (&json!("E"), &json!(false)), "{odd:#}");
    assert_eq!(sandbox.value("python", "marker"), "1");
    let asked = sandbox.python("breakpoint()");
    assert!(asked["error"]["value"].as_str().unwrap().contains("breakpoint()"), "{asked:#}");
}

#[test]
fn a_thread_that_goes_on_printing_is_told_apart() {
    let sandbox = Box::new();
    let started = sandbox.python(
        "import threading, time\ndef go():\n    for i in range(1000):\n        print('later', flush=True); time.sleep(0.01)\nthreading.Thread(target=go, daemon=True).start()\n'started'",
    );
    assert_eq!(text_of(&started), "'started'");
    until("the thread has printed between cells", 20, || {
        let next = sandbox.python("'mine'");
        assert_eq!(text_of(&next), "'mine'");
        next["background"]["text"].as_str().unwrap().contains("later")
    });
}

#[test]
fn cells_of_one_context_wait_for_each_other() {
    let sandbox = Box::new();
    sandbox.python("order = []");
    std::thread::scope(|scope| {
        for number in 0..4 {
            let sandbox = &sandbox;
            scope.spawn(move || {
                let code =
                    format!("import time\norder.append({number}); time.sleep(0.3); order.append({number})");
                assert_eq!(sandbox.python(&code)["exit_code"], 0);
            });
        }
    });
    let order: Vec<u32> = serde_json::from_str(&sandbox.value("python", "order")).unwrap();
    assert!(order.chunks(2).all(|pair| pair[0] == pair[1]) && order.len() == 8, "{order:?}");
}

#[test]
fn javascript_and_typescript_share_a_context() {
    let sandbox = Box::new();
    assert_eq!(sandbox.value("javascript", "const x = 20; let y = 1; x + y"), "21");
    assert_eq!(sandbox.value("typescript", "const z: number = x + 22; z"), "42");
    assert_eq!(sandbox.value("javascript", "const x = 'again'; x"), "'again'");
    assert_eq!(sandbox.value("javascript", "await Promise.resolve(z)"), "42");
    let result = sandbox.cell("javascript", &[], "console.log('out'); console.error('err'); null.x");
    assert_eq!((stdout(&result), &result["error"]["name"]), ("out\n", &json!("TypeError")), "{result:#}");
    let endless = sandbox.cell("javascript", &["--timeout", &patient_seconds(2)], "while (true) {}");
    assert_eq!((&endless["exit_code"], &endless["state_lost"]), (&json!(124), &json!(false)), "{endless:#}");
    let waiting =
        sandbox.cell("javascript", &["--timeout", &patient_seconds(2)], "await new Promise(() => {})");
    assert_eq!(waiting["exit_code"], 124, "{waiting:#}");
    assert_eq!(sandbox.value("javascript", "z"), "42");
    let left = sandbox.cell("javascript", &[], "process.exit(5)");
    assert_eq!((&left["exit_code"], &left["state_lost"]), (&json!(5), &json!(true)), "{left:#}");
    assert_eq!(sandbox.value("javascript", "typeof z"), "'undefined'");
}

#[test]
fn bash_keeps_its_variables_and_its_folder() {
    let sandbox = Box::new();
    let first = sandbox.cell("bash", &[], "cd /tmp; greeting='a b'; greet() { echo \"$greeting\"; }");
    assert_eq!(first["exit_code"], 0, "{first:#}");
    assert_eq!(stdout(&sandbox.cell("bash", &[], "greet; pwd")), "a b\n/tmp\n");
    let failed = sandbox.cell("bash", &[], "false");
    assert_eq!((&failed["exit_code"], &failed["error"]["value"]), (&json!(1), &json!("1")), "{failed:#}");
    let broken = sandbox.cell("bash", &[], "if true; then");
    assert_eq!((&broken["exit_code"], &broken["state_lost"]), (&json!(1), &json!(false)), "{broken:#}");
    let endless = sandbox.cell("bash", &["--timeout", &patient_seconds(2)], "while :; do sleep 1; done");
    assert_eq!((&endless["exit_code"], &endless["state_lost"]), (&json!(124), &json!(false)), "{endless:#}");
    assert_eq!(stdout(&sandbox.cell("bash", &[], "greet")), "a b\n");
    let left = sandbox.cell("bash", &[], "exit 7");
    assert_eq!((&left["exit_code"], &left["state_lost"]), (&json!(7), &json!(true)), "{left:#}");
    assert_eq!(stdout(&sandbox.cell("bash", &[], "echo \"[$greeting]\"")), "[]\n");
}

#[test]
fn what_cannot_run_is_refused_with_words() {
    let sandbox = Box::new();
    let home = &sandbox.home;
    let result = home.fails(&["code", "--sandbox", "box", "--context", "no such", "-c", "1"], 125);
    assert!(result.contains("no such"), "{result}");
    let result = home.fails(&["code", "--sandbox", "box", "--lang", "cobol", "-c", "1"], 125);
    assert!(result.contains("python") && result.contains("bash"), "{result}");
    let long = "#".repeat(9_000_000);
    let ran = home.run_with(&["code", "--sandbox", "box", "-"], long.as_bytes());
    assert!(ran.code != Some(0) && ran.stderr.contains("more than 8388608 bytes"), "{ran:?}");
    home.root_sh("box", "rm /usr/bin/node");
    let ran = home.run(&["code", "--sandbox", "box", "--lang", "javascript", "-c", "1"]);
    assert!(ran.code != Some(0) && ran.stderr.contains("node"), "{ran:?}");
    assert_eq!(sandbox.value("python", "1"), "1");
}

#[test]
fn every_cell_is_in_the_audit_log() {
    let sandbox = Box::new();
    sandbox.python("40 + 2");
    sandbox.python("1 / 0");
    // The client gets the end at once; the store has it a moment later.
    until("both ends are recorded", 5, || {
        sandbox.home.events("box").iter().filter(|event| event["event"] == "exec_ended").count() == 2
    });
    let events = sandbox.home.events("box");
    let started: BTreeMap<&str, &str> = events
        .iter()
        .filter(|event| event["event"] == "code_started")
        .map(|event| (event["code"].as_str().unwrap(), event["exec"].as_str().unwrap()))
        .collect();
    assert_eq!(started.keys().copied().collect::<Vec<_>>(), ["1 / 0", "40 + 2"]);
    let ended =
        |exec: &str| events.iter().find(|event| event["event"] == "exec_ended" && event["exec"] == exec);
    assert_eq!(ended(started["40 + 2"]).unwrap()["exit"], "code 0");
    assert_eq!(ended(started["1 / 0"]).unwrap()["exit"], "code 1");
}

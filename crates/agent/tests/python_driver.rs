//! Tests of the Python driver, which is run natively with the agent's protocol: values, output, errors,
//! magics.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

mod support;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use support::python::{self, start, start_in};
use support::{Driver, Look};

/// A driver that finds these modules, in a folder that exists as long as the test.
fn start_with_modules(modules: &[(&str, &str)]) -> (Driver, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    for (path, source) in modules {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, source).unwrap();
    }
    let mut driver = start_in(folder.path(), &[("PYTHONPATH", folder.path().to_str().unwrap())]);
    driver.hello();
    (driver, folder)
}

/// A driver without IPython even if this machine has it.
fn start_without_ipython() -> Driver {
    let mut driver = start();
    let hidden = "import sys\nsys.path[:] = [p for p in sys.path if 'packages' not in p]";
    assert_eq!(driver.execute(hidden).status(), "ok");
    driver
}

#[test]
fn hello_reports_the_version() {
    let version = start_in(Path::new("/"), &[]).hello();
    assert!(version["version"].text().starts_with("3."), "{version:?}");
}

#[test]
fn state_is_kept_and_the_last_expression_is_the_value() {
    let mut driver = start();
    let first = driver.execute("x = 20");
    assert_eq!((first.value(), first.status(), first.count()), (None, "ok", 1.0));
    let second = driver.execute("y = 1\nx + y");
    assert_eq!((second.value(), second.count()), (Some("21"), 2.0));
    assert_eq!(driver.execute("_ * 2").value(), Some("42"));
    assert_eq!(driver.execute("__name__").value(), Some("'__main__'"));
}

#[test]
fn semicolon_silences_the_value() {
    let mut driver = start();
    assert_eq!(driver.execute("4;").value(), None);
    assert_eq!(driver.execute("('é'); # why").value(), None);
    assert_eq!(driver.execute("';'").value(), Some("';'"));
}

#[test]
fn nothing_of_the_driver_is_in_the_cells_namespace() {
    let cell = start().execute("sorted(name for name in globals() if not name.startswith('__'))");
    assert_eq!(cell.value(), Some("[]"));
}

#[test]
fn code_of_five_megabytes_runs() {
    let cell = start().execute(&format!("s = '{}'\nlen(s)", "a".repeat(5 << 20)));
    assert_eq!(cell.value(), Some("5242880"));
}

#[test]
fn rich_values_are_bundles() {
    let cell = start().execute(
        "class Rich:\n    def _repr_html_(self): return '<b>'\n    def _repr_png_(self): return b'\\x89PNG'\n    \
         def _repr_json_(self): return {'nan': float('nan'), 'list': [1, None, True]}\n    \
         def _repr_svg_(self): raise NotImplementedError\nRich()",
    );
    let data = &cell.one('r')["data"];
    assert_eq!(data["text/html"].text(), "<b>");
    assert_eq!(data["image/png"].text(), "iVBORw==");
    assert_eq!(data["application/json"], serde_json::json!({"nan": null, "list": [1, null, true]}));
    assert!(data["text/plain"].text().contains("Rich object"));
    assert!(!data.has("image/svg+xml"));
}

#[test]
fn mimebundle_method_is_asked_first() {
    let cell = start().execute(
        "class Rich:\n    def _repr_mimebundle_(self, **_): return {'text/plain': 'mine', 'text/latex': '$x$'}\nRich()",
    );
    let data = &cell.one('r')["data"];
    assert_eq!((data["text/plain"].text(), data["text/latex"].text()), ("mine", "$x$"));
}

#[test]
fn several_displays_arrive_in_order_before_the_value() {
    let cell = start().execute("display(1, 'two')\ndisplay({'text/html': '<i>'}, raw=True)\n3");
    let kinds: String = cell.replies.iter().map(|reply| reply.kind).collect();
    assert_eq!(kinds, "dddrf");
    assert_eq!(cell.all('d')[1]["data"]["text/plain"].text(), "'two'");
    assert_eq!(cell.all('d')[2]["data"]["text/html"].text(), "<i>");
}

#[test]
fn displays_beyond_64_are_one_note() {
    let cell = start().execute("for i in range(1000): display(i)");
    let displays = cell.all('d');
    assert_eq!(displays.len(), 65);
    assert!(displays[64]["data"]["text/plain"].text().contains("more than 64 displays"));
}

#[test]
fn substitute_for_ipython_display_shows() {
    let cell = start_without_ipython().execute(
        "from IPython.display import display, HTML, Markdown, JSON, Image, clear_output\nclear_output()\n\
         display(HTML('<u>'), Markdown('# m'), JSON({'a': 1}), Image(b'\\xff\\xd8jpeg'))",
    );
    assert_eq!(cell.error(), None);
    let displays = cell.all('d');
    assert_eq!(displays[0]["data"]["text/html"].text(), "<u>");
    assert_eq!(displays[1]["data"]["text/markdown"].text(), "# m");
    assert_eq!(displays[2]["data"]["application/json"]["a"].number(), 1.0);
    assert!(displays[3]["data"].has("image/jpeg"));
}

#[test]
fn long_values_travel_in_pieces() {
    let cell = start().execute("display({'text/html': '<p>' * 1_000_000}, raw=True)");
    let reply = &cell.replies[0];
    assert!(reply.packets > 50, "{} packets", reply.packets);
    assert_eq!(reply.json["data"]["text/html"].text().len(), 3_000_000);
}

#[test]
fn value_over_eight_megabytes_is_left_out_and_reported() {
    let cell = start().execute("display({'text/html': 'x' * (9 << 20), 'text/plain': 'small'}, raw=True)");
    let display = cell.one('d');
    assert!(!display["data"].has("text/html"));
    assert_eq!(display["data"]["text/plain"].text(), "small");
    assert_eq!(display["omitted"][0]["mime"].text(), "text/html");
    assert_eq!(display["omitted"][0]["bytes"].number(), 9_437_184.0);
}

#[test]
fn bundle_over_sixteen_megabytes_is_cut_down() {
    let code = "display({f'text/x{i}': 'x' * (7 << 20) for i in range(3)}, raw=True)";
    let cell = start().execute(code);
    assert_eq!(cell.one('d')["data"].as_object().unwrap().len(), 2);
    assert_eq!(cell.one('d')["omitted"].items().len(), 1);
}

#[test]
fn huge_reprs_are_cut_without_being_built() {
    let mut driver = start();
    // Under this limit the full texts of these values do not fit into memory.
    let limit =
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (600 << 20, resource.RLIM_INFINITY))";
    assert_eq!(driver.execute(limit).status(), "ok");
    for code in
        ["'x' * (200 << 20)", "[b'y' * 99] * 20_000_000", "{1: ['z' * 99] * 20_000_000}", "1 << 80_000_000"]
    {
        let cell = driver.execute(&format!("{code}\n"));
        assert_eq!(cell.error(), None, "{code}: {:?}", cell.all('e'));
        let text = cell.value().unwrap();
        assert!(text.len() <= 64 << 10 && text.len() > 20, "{code}: {} bytes", text.len());
        driver.execute("del _");
    }
}

#[test]
fn cut_text_reports_the_full_length() {
    let cell = start().execute("'é' * 100_000");
    let result = cell.one('r');
    assert!(result["data"]["text/plain"].text().len() <= 64 << 10);
    assert_eq!(result["omitted"][0]["mime"].text(), "text/plain");
    assert!(result["omitted"][0]["reason"].text().contains("100000"), "{result:?}");
}

#[test]
fn bounded_repr_is_repr_for_what_is_small() {
    let cell = start().execute(
        "v = [[], (), (1,), {}, set(), frozenset(), {1}, frozenset({2}), {'a': (1, 2.5)}, b'x', None, 10**30]\n\
         v.append(v); d = {}; d[0] = d; v.append(d); print(repr(v)); v",
    );
    assert_eq!(cell.value(), Some(cell.stdout.trim_end()));
}

#[test]
fn repr_that_raises_is_the_error_it_is() {
    let mut driver = start();
    let cell = driver.execute("class A:\n    def __repr__(self): raise KeyError('inside')\nA()");
    assert_eq!((cell.error(), cell.status()), (Some("KeyError"), "error"));
    assert!(cell.traceback().contains("in __repr__"));
}

#[test]
fn lone_surrogates_are_still_json() {
    let cell = start().execute("display({'text/html': 'a\\ud800b'}, raw=True)\nprint('\\ud800')");
    assert_eq!(cell.one('d')["data"]["text/html"].text(), "a?b");
    assert_eq!(cell.stdout, "\\ud800\n");
}

const PYPLOT: &str = "import matplotlib\nfrom matplotlib import _pylab_helpers, figure\n\
    def figure_(*size):\n    new = figure.Figure(*size)\n    _pylab_helpers.Gcf.figs[len(_pylab_helpers.Gcf.figs)] = new\n    \
    return new\ndef show(): raise RuntimeError('the real one')\n";
const FIGURE: &str = "class Figure:\n    dpi = 100\n    def __init__(self, *size): self.size = size or (6, 4)\n    \
    canvas = property(lambda self: self)\n    figure = property(lambda self: self)\n    \
    def get_size_inches(self): return self.size\n    \
    def savefig(self, file, **_): file.write(b'PNG of %d' % self.size[0])\n";
const HELPERS: &str =
    "class Gcf:\n    figs = {}\n    @classmethod\n    def destroy_all(cls): cls.figs.clear()\n";

/// Enough of matplotlib for the driver's own part; the tests in the guest use the real one.
fn start_with_matplotlib() -> (Driver, tempfile::TempDir) {
    let (mut driver, folder) = start_with_modules(&[
        (
            "matplotlib/__init__.py",
            "import os\nrcParams = {'savefig.dpi': 'figure'}\nbackend = os.environ['MPLBACKEND']",
        ),
        ("matplotlib/pyplot.py", PYPLOT),
        ("matplotlib/figure.py", FIGURE),
        ("matplotlib/_pylab_helpers.py", HELPERS),
    ]);
    let cell = driver.execute("%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.matplotlib.backend");
    assert_eq!(cell.value(), Some("'Agg'"), "{cell:?}");
    (driver, folder)
}

#[test]
fn open_figures_are_shown_once_in_order_and_closed() {
    let (mut driver, _folder) = start_with_matplotlib();
    let cell = driver.execute("plt.figure_(1, 1); plt.figure_(2, 2)\nNone");
    let images: Vec<&str> = cell.all('d').iter().map(|shown| shown["data"]["image/png"].text()).collect();
    assert_eq!(images, ["UE5HIG9mIDE=", "UE5HIG9mIDI="]);
    assert!(driver.execute("1").all('d').is_empty());
}

#[test]
fn show_shows_at_once() {
    let (mut driver, _folder) = start_with_matplotlib();
    let cell = driver.execute("plt.figure_()\nplt.show()\ndisplay('after')\nplt.figure_();");
    assert_eq!(cell.error(), None);
    let kinds: Vec<bool> = cell.all('d').iter().map(|shown| shown["data"].has("image/png")).collect();
    assert_eq!(kinds, [true, false, true]);
}

#[test]
fn figure_as_value_is_not_shown_twice() {
    let (mut driver, _folder) = start_with_matplotlib();
    let cell = driver.execute("plt.figure_()");
    assert!(cell.one('r')["data"].has("image/png"));
    assert!(cell.all('d').is_empty());
}

#[test]
fn figures_of_a_failed_cell_are_shown_too() {
    let (mut driver, _folder) = start_with_matplotlib();
    let cell = driver.execute("plt.figure_()\n1/0");
    assert_eq!((cell.all('d').len(), cell.error()), (1, Some("ZeroDivisionError")));
}

#[test]
fn figure_of_400_megapixels_is_reported_and_not_drawn() {
    let (mut driver, _folder) = start_with_matplotlib();
    let cell = driver.execute("plt.figure_(200, 200);");
    let shown = cell.one('d');
    assert!(!shown["data"].has("image/png"));
    let reason = shown["omitted"][0]["reason"].text();
    assert!(reason.contains("20000 x 20000 pixels") && reason.contains("figsize"), "{reason}");
}

#[test]
fn output_of_code_and_children_is_streamed() {
    let mut driver = start();
    driver.begin(
        "import os, time\nprint('first')\nwhile not os.path.exists('/nowhere'): time.sleep(1)",
        "",
        "",
        &[],
    );
    assert_eq!(driver.wait_for_output("first\n"), "first\n");
    driver.interrupt();
    driver.finish();
    let cell = driver.execute(
        "import os, sys\nprint('one')\nos.system('echo two; echo bad >&2')\nos.write(1, b'three\\n')\n\
         sys.stderr.write('no newline')\nprint('four', end='')",
    );
    assert_eq!((cell.stdout.as_str(), cell.stderr.as_str()), ("one\ntwo\nthree\nfour", "bad\nno newline"));
}

#[test]
fn traceback_shows_the_cells_lines_and_not_ours() {
    let mut driver = start();
    driver.execute("def f(n):\n    return 1 / n");
    let cell =
        driver.execute("try:\n    f(0)\nexcept ZeroDivisionError as e:\n    raise ValueError('no') from e");
    let error = cell.one('e');
    assert_eq!((error["name"].text(), error["value"].text()), ("ValueError", "no"));
    let text = cell.traceback();
    assert!(text.contains("File \"<cell 1>\", line 2, in f\n    return 1 / n"), "{text}");
    assert!(text.contains("direct cause") && text.contains("raise ValueError('no') from e"), "{text}");
    assert!(!text.contains("driver"), "{text}");
}

#[test]
fn traceback_of_user_code_shows_cells_too() {
    let cell =
        start().execute("import traceback\ntry:\n    1/0\nexcept Exception:\n    traceback.print_exc()");
    assert!(cell.stderr.contains("line 3, in <module>\n    1/0"), "{}", cell.stderr);
}

#[test]
fn syntax_error_has_its_caret_and_counts() {
    let mut driver = start();
    let cell = driver.execute("x = = 3");
    assert_eq!((cell.error(), cell.count()), (Some("SyntaxError"), 1.0));
    let text = cell.traceback();
    assert!(text.starts_with("  File \"<cell 1>\", line 1\n    x = = 3\n        ^"), "{text}");
}

#[test]
fn exit_is_an_error_unless_all_is_well_and_the_state_stays() {
    let mut driver = start();
    let cell = driver.execute("x = 5\nimport sys\nsys.exit(3)");
    assert_eq!((cell.error(), cell.one('e')["value"].text()), (Some("SystemExit"), "3"));
    for quiet in ["exit()", "sys.exit(0)", "raise SystemExit"] {
        assert_eq!(driver.execute(quiet).error(), None, "{quiet}");
    }
    assert_eq!(driver.execute("x").value(), Some("5"));
}

#[test]
fn endless_recursion_is_a_short_error() {
    let mut driver = start();
    let cell = driver.execute("def f(): f()\nf()");
    assert_eq!(cell.error(), Some("RecursionError"));
    assert!(cell.one('e')["traceback"].items().len() < 30);
    let two = driver.execute("def g(n): return h(n)\ndef h(n): return g(n)\ng(0)");
    assert!(two.one('e')["traceback"].items().len() <= 201);
}

#[test]
fn no_memory_is_an_error_and_the_state_stays() {
    let mut driver = start();
    let limit =
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (400 << 20, resource.RLIM_INFINITY))";
    driver.execute(limit);
    assert_eq!(driver.execute("x = 1\ny = bytearray(1 << 30)").error(), Some("MemoryError"));
    assert_eq!(driver.execute("x").value(), Some("1"));
}

#[test]
fn huge_error_text_is_cut() {
    let cell = start().execute("raise ValueError('x' * 10_000_000)");
    assert_eq!(cell.error(), Some("ValueError"));
    assert!(cell.replies[0].bytes < 100 << 10, "{} bytes", cell.replies[0].bytes);
}

#[test]
fn reading_the_keyboard_is_refused() {
    let mut driver = start();
    for code in [
        "input('name? ')",
        "import sys\nsys.stdin.readline()",
        "import getpass\ngetpass.getpass()",
        "breakpoint()",
        "import pdb\npdb.set_trace()",
    ] {
        let cell = driver.execute(code);
        assert_eq!(cell.error(), Some("EOFError"), "{code}");
        assert!(cell.one('e')["value"].text().contains("there is no keyboard input"), "{code}");
    }
}

#[test]
fn await_at_top_level_keeps_one_loop() {
    let mut driver = start();
    let code = "import asyncio\nloop = asyncio.get_running_loop()\nevent = asyncio.Event()\n\
                task = asyncio.create_task(event.wait())\nawait asyncio.sleep(0, 'slept')";
    assert_eq!(driver.execute(code).value(), Some("'slept'"));
    let code = "event.set()\nsame = loop is asyncio.get_running_loop()\n(await task, same)";
    assert_eq!(driver.execute(code).value(), Some("(True, True)"));
    assert_eq!(driver.execute("await asyncio.sleep(0)").value(), None);
}

#[test]
fn interrupt_cancels_an_await_with_its_cleanup() {
    let mut driver = start();
    driver.begin(
        "import asyncio\ntry:\n    print('waiting')\n    await asyncio.sleep(60)\nfinally:\n    x = 'cleaned'",
        "",
        "",
        &[],
    );
    driver.wait_for_output("waiting");
    driver.interrupt();
    assert_eq!(driver.finish().error(), Some("KeyboardInterrupt"));
    assert_eq!(driver.execute("x").value(), Some("'cleaned'"));
}

#[test]
fn shell_lines_run_and_give_their_lines() {
    let mut driver = start();
    assert_eq!(
        driver.execute("word = 'hi'\n!echo {word} $word '{print}' $((1+1))").stdout,
        "hi hi {print} 2\n"
    );
    assert_eq!(driver.execute("if True:\n    lines = !printf 'a\\nb'\nlines").value(), Some("['a', 'b']"));
    assert_eq!(driver.execute("!exit 3\n_exit_code").value(), Some("3"));
}

#[test]
fn magics_leave_python_alone() {
    let mut driver = start();
    let cell = driver.execute(
        "a, b = 7, 4\ns = '''\n!not me\n%nor me\n'''\nx = (a\n  % b)\ny = a \\\n  % b\n%cd /\n(len(s), x, y)",
    );
    assert_eq!(cell.value(), Some("(17, 3, 3)"), "{cell:?}");
}

#[test]
fn line_magics_work() {
    let home = tempfile::tempdir().unwrap();
    let mut driver = start();
    let cd = driver.execute(&format!("%cd {}", home.path().display()));
    assert_eq!(cd.stdout, format!("{}\n", home.path().display()));
    assert_eq!(driver.execute("%pwd").value(), Some(format!("'{}'", home.path().display()).as_str()));
    assert_eq!(driver.execute("%env COLOUR=red\nimport os\nos.environ['COLOUR']").value(), Some("'red'"));
    driver.execute("%%writefile made.txt\n{left} as it is");
    assert_eq!(support::read_text(&home.path().join("made.txt")), "{left} as it is");
    assert_eq!(driver.execute("%ls").stdout, "made.txt\n");
    let timed = driver.execute("%time y = sum([1, 2])\ny");
    assert!(timed.value() == Some("3") && timed.stdout.contains("wall time"), "{timed:?}");
    assert!(driver.execute("%timeit -1").stdout.contains("per loop"));
}

#[test]
fn bash_cells_run_and_their_failure_is_an_error() {
    let mut driver = start();
    assert_eq!(driver.execute("%%bash\nfor i in 1 2; do echo $i; done").stdout, "1\n2\n");
    let failed = driver.execute("%%bash\nexit 3");
    assert_eq!(failed.error(), Some("CalledProcessError"));
    assert!(failed.one('e')["value"].text().contains("status 3"));
    assert_eq!(driver.execute(&format!("%%bash\n#{}\necho long", "x".repeat(300_000))).stdout, "long\n");
}

#[test]
fn pip_magic_runs_this_interpreters_pip() {
    let (mut driver, _folder) =
        start_with_modules(&[("pip.py", "import sys\nprint('pip got', sys.argv[1:])")]);
    assert_eq!(driver.execute("%pip install 'a b'").stdout, "pip got ['install', 'a b']\n");
}

#[test]
fn unknown_magic_names_those_that_exist() {
    let mut driver = start();
    let line = driver.execute("%nothing");
    assert_eq!(line.error(), Some("MagicError"));
    assert!(line.one('e')["value"].text().contains("%cd, %env"), "{line:?}");
    assert!(driver.execute("%%nothing\nx").one('e')["value"].text().contains("%%bash"));
}

#[test]
fn ready_and_simple_cells_are_fast() {
    let best = |times: Vec<Duration>| times.into_iter().min().unwrap();
    let ready = best(
        (0..5)
            .map(|_| {
                let begun = Instant::now();
                start();
                begun.elapsed()
            })
            .collect(),
    );
    let mut driver = start();
    let cell = best((0..200).map(|_| driver.execute("1+1").took).collect());
    println!("ready in {ready:?}, 1+1 in {cell:?}, driver of {} bytes", python::SOURCE.len());
    // Many times what it takes on an idle machine: other tests run at the same time.
    assert!(ready < Duration::from_millis(500) && cell < Duration::from_millis(5), "{ready:?} {cell:?}");
}

//! The registry of contexts, and refused requests.

use bathy_protocol::Restriction;
use bathy_protocol::cell::CellEnd;

use super::*;

fn refusal(guest: &mut Guest, cell: Cell) -> String {
    guest.run(cell).refused.clone().unwrap()
}

fn named(name: &str) -> ContextsRequest {
    ContextsRequest::Make { context: name.into(), language: Language::Python, surroundings: surroundings() }
}

#[test]
fn an_unknown_context_is_refused_with_those_that_exist() {
    let mut guest = Guest::new();
    let missing = Cell { context: "mine".into(), make: None, ..python("1") };
    assert_eq!(refusal(&mut guest, missing.clone()), "there is no context \"mine\" (there is: none)");
    guest.change(named("a")).unwrap();
    guest.change(named("b")).unwrap();
    assert_eq!(refusal(&mut guest, missing), "there is no context \"mine\" (there is: a, b)");
    let wrong = Cell { context: "a".into(), language: Language::Bash, ..python("1") };
    assert_eq!(refusal(&mut guest, wrong), "the context a is for python, not for bash");
}

#[test]
fn requests_that_cannot_be_met_are_refused() {
    let mut guest = Guest::new();
    assert!(refusal(&mut guest, python(&"x".repeat(MAX_CODE + 1))).contains("the most is"));
    let bash = Cell { language: Language::Bash, context: "bash".into(), ..python("a\0b") };
    assert_eq!(refusal(&mut guest, bash), "bash code cannot contain a zero byte");
    for env in ["novalue", "=x", "A=\0"] {
        let cell = Cell { env: vec![env.into()], ..python("1") };
        assert!(refusal(&mut guest, cell).contains("NAME=value"));
    }
    let named = |name: &str| Cell { context: name.into(), ..python("1") };
    for name in ["", "a/b", "a b", &"n".repeat(65)] {
        assert!(refusal(&mut guest, named(name)).contains("name is"), "{name}");
    }
    assert_eq!(guest.change(ContextsRequest::List).unwrap(), []);
}

#[test]
fn queues_and_registry_are_bounded() {
    let mut guest = Guest::new();
    let pending: Vec<u32> = (0..MAX_WAITING).map(|_| guest.ask(python("1"))).collect();
    assert!(refusal(&mut guest, python("1")).contains("64 cells wait"));
    let big = || python(&"#".repeat(MAX_CODE));
    let other = |number: u32| Cell { context: format!("c{number}"), ..big() };
    let refused = (0..5).map(|number| guest.ask(other(number))).last().unwrap();
    assert!(guest.seen[&refused].refused.as_ref().unwrap().contains("too much code"));
    for stream in pending {
        guest.send(stream, &ToGuest::Abandon);
    }
    let full = (0..40).map(|number| guest.change(named(&format!("d{number}")))).find_map(Result::err);
    assert!(full.unwrap().contains("32 contexts"));
}

#[test]
fn r12_code_that_is_restricted_further_does_not_run_in_a_context_that_is_not() {
    let mut guest = Guest::new();
    guest.run(python("x = 1"));
    let (strict, loose) = (Restriction::default(), Restriction { writable_root: true });
    let cell = |restricted| Cell { restricted: Some(restricted), make: None, ..python("print(x)") };
    for restricted in [strict, loose] {
        let said = refusal(&mut guest, cell(restricted));
        assert!(said.contains("context python was started with fewer restrictions than apply now"), "{said}");
    }
    // The context keeps its state for code that may run in it.
    assert_eq!(guest.run(python("print(x)")).text(RecordKind::Stdout), "1\n");
    // What counts is what the interpreter was started with.
    let context = &mut guest.contexts.contexts[0];
    context.restrict(Some(loose));
    assert!(context.covers(Some(loose)) && context.covers(None) && !context.covers(Some(strict)));
    // A new interpreter is restricted as requested, whichever request created the context.
    let restart = ContextsRequest::Restart { context: "python".into(), restricted: Some(strict) };
    let _ = guest.change(restart);
    assert_eq!(guest.contexts.contexts[0].surroundings.restricted, Some(strict));
}

#[test]
fn a_context_is_made_listed_and_removed() {
    let mut guest = Guest::new();
    let [made] = <[ContextInfo; 1]>::try_from(guest.change(named("mine")).unwrap()).unwrap();
    assert_eq!((made.context.as_str(), made.busy, made.waiting, made.cells), ("mine", false, 0, 0));
    assert!(made.pid.is_some());
    assert_eq!(guest.change(named("mine")).unwrap_err(), "there is a context mine already");
    let mine = |code| Cell { context: "mine".into(), make: None, ..python(code) };
    let seen = guest.run(mine("1"));
    assert!(seen.started().fresh);
    let list = guest.change(ContextsRequest::List).unwrap();
    assert_eq!((list[0].cells, list[0].pid), (1, made.pid));
    assert_eq!(guest.change(ContextsRequest::Remove { context: "mine".into() }).unwrap(), []);
    assert!(guest.change(ContextsRequest::Remove { context: "mine".into() }).is_err());
    assert!(guest.run(mine("1")).refused.is_some());
}

#[test]
fn removal_ends_the_cells() {
    let mut guest = Guest::new();
    let running = guest.ask(python("print('runs', flush=True)\nimport time\ntime.sleep(60)"));
    let waiting = guest.ask(python("1"));
    guest.until(|guest| !guest.seen[&running].bytes(RecordKind::Stdout).is_empty());
    let list = guest.change(ContextsRequest::List).unwrap();
    assert_eq!((list[0].busy, list[0].waiting), (true, 1));
    guest.change(ContextsRequest::Remove { context: "python".into() }).unwrap();
    let ended = guest.finish(running).ended();
    assert_eq!((ended.end, ended.state_lost), (CellEnd::Killed, true));
    assert_eq!(guest.finish(waiting).ended().end, CellEnd::Cancelled);
}

#[test]
fn a_restart_begins_anew_and_an_interrupt_does_not() {
    let mut guest = Guest::new();
    guest.run(python("x = 1"));
    let running = guest.ask(python("print('runs', flush=True)\nimport time\ntime.sleep(60)"));
    guest.until(|guest| !guest.seen[&running].bytes(RecordKind::Stdout).is_empty());
    guest.change(ContextsRequest::Interrupt { context: "python".into() }).unwrap();
    assert!(!guest.finish(running).ended().state_lost);
    assert_eq!(guest.run(python("print(x)")).text(RecordKind::Stdout), "1\n");
    let list = guest.change(ContextsRequest::Restart { context: "python".into(), restricted: None }).unwrap();
    assert!(list[0].pid.is_some());
    let seen = guest.run(python("print('x' in globals())"));
    assert_eq!(seen.text(RecordKind::Stdout), "False\n");
    assert_eq!(seen.started().lost.as_deref(), Some("the context was restarted"));
}

#[test]
fn nothing_is_started_while_the_sandbox_shuts_down() {
    let mut guest = Guest::new();
    guest.contexts.close();
    let stream = guest.ask(python("1"));
    assert_eq!(guest.finish(stream).ended().end, CellEnd::Cancelled);
    assert_eq!(guest.change(ContextsRequest::List).unwrap()[0].pid, None);
}

#[test]
fn javascript_and_typescript_share_a_context() {
    let mut guest = Guest::new();
    let cell = |language, code| Cell { context: "javascript".into(), language, ..python(code) };
    let seen = guest.run(cell(Language::JavaScript, "console.log(6 * 7)"));
    assert_eq!((seen.text(RecordKind::Stdout).as_str(), seen.exit), ("42\n", Some(Exit::Code(0))));
    // Whether the machine's Node supports it or not, the cell is sent to the same process.
    let stream = guest.ask(cell(Language::TypeScript, "const n: number = 4"));
    guest.until(|guest| !guest.seen[&stream].records.is_empty());
    assert!(!guest.seen[&stream].started().fresh);
    let list = guest.change(ContextsRequest::List).unwrap();
    assert_eq!((list.len(), list[0].language, list[0].cells), (1, Language::JavaScript, 2));
}

#[test]
fn bash_keeps_its_state_and_takes_long_code() {
    let mut guest = Guest::new();
    let bash = |code: &str| Cell { context: "bash".into(), language: Language::Bash, ..python(code) };
    let seen = guest.run(bash("x=5; f() { echo \"f $1 $x\"; }"));
    assert_eq!(seen.exit, Some(Exit::Code(0)), "{}", seen.text(RecordKind::Error));
    assert_eq!(guest.run(bash("f y; echo e >&2")).text(RecordKind::Stdout), "f y 5\n");
    let long = format!("text={}\necho ${{#text}}", "z".repeat(5_000_000));
    assert_eq!(guest.run(bash(&long)).text(RecordKind::Stdout), "5000000\n");
    let cell = Cell { timeout_ms: 200, ..bash("sleep 60") };
    assert!(!guest.run(cell).ended().state_lost);
    assert_eq!(guest.run(bash("f z")).text(RecordKind::Stdout), "f z 5\n");
}

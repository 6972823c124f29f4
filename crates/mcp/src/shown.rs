//! The answer of the tools that run code: outputs, values, errors.

use std::fmt::Write;

use bathy_client::interpreter::{Bundle, CellOutcome, CodeError, Collected, Language};
use rmcp::model::Resource;
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Image, MAX_IMAGES};
use crate::call::Call;
use crate::error::ToolError;
use crate::outputs::{self, ONE};
use crate::text;

/// The most of one form of a value in an answer.
const FORM: usize = 16 * 1024;
/// The most of all forms of all values in an answer.
const FORMS: usize = 128 * 1024;
/// How many values an answer has.
const VALUES: usize = 64;
/// How many lines of a traceback an answer has.
const TRACEBACK: usize = 60;

/// The longest HTML that is shown in place of an object's `repr`, in bytes.
const SHORT: usize = 2000;

struct Stream {
    shown: String,
    link: Option<Resource>,
}

/// Keeps outputs that are too long for their answer.
pub struct Shelf<'a> {
    call: &'a Call,
    tool: &'a str,
    id: Option<String>,
}

impl<'a> Shelf<'a> {
    pub fn new(call: &'a Call, tool: &'a str) -> Self {
        Self { call, tool, id: None }
    }

    /// The part of an output that an answer shows, and a link to the whole if that is longer. `total` is the length before
    /// any cut.
    pub fn put(
        &mut self,
        kind: &str,
        output: &str,
        total: u64,
    ) -> Result<(String, Option<Resource>), ToolError> {
        let clean = text::clean(output);
        let cut = text::cut(&clean, text::INLINE);
        let kept = u64::try_from(output.len()).unwrap_or(u64::MAX);
        if cut.left_out == 0 && kept >= total {
            return Ok((cut.text, None));
        }
        let failed = |error| ToolError::Failed(format!("Cannot keep the output: {error}"));
        let id = match &self.id {
            Some(id) => id.clone(),
            None => self.id.insert(outputs::new_id().map_err(failed)?).clone(),
        };
        let whole = clean.get(..clean.floor_char_boundary(ONE)).unwrap_or_default().to_owned();
        let link = self.call.state.outputs.keep(&id, kind, self.tool, whole);
        let mut shown = cut.text;
        let more =
            if total > kept { format!(", of which the first {kept} were kept") } else { String::new() };
        // Writing to a string cannot fail.
        let _ = write!(
            shown,
            "\n[{kind} was {total} bytes{more}; it is not all shown here. read_output reads the rest: output \"{id}/{kind}\", offset {}.]",
            cut.head
        );
        Ok((shown, Some(link)))
    }

    fn stream(&mut self, kind: &str, output: &str, total: u64) -> Result<Stream, ToolError> {
        let (shown, link) = self.put(kind, output, total)?;
        Ok(Stream { shown, link })
    }
}

/// The answer to a cell. `about` has the members of the tool's own.
pub fn answer(
    call: &Call,
    tool: &str,
    (collected, outcome): (&Collected, &CellOutcome),
    about: Map<String, Value>,
    mut notes: Vec<String>,
) -> Result<Answer, ToolError> {
    let ended = &outcome.ended;
    let mut shelf = Shelf::new(call, tool);
    let stdout = shelf.stream("stdout", &collected.stdout.text(), ended.stdout_bytes)?;
    let stderr = shelf.stream("stderr", &collected.stderr.text(), ended.stderr_bytes)?;
    let (background, _) = shelf.put("background", &collected.background.text(), ended.background_bytes)?;
    notes.extend(remarks(outcome, &background));
    let mut values = Values { room: call.state.options.pictures, ..Values::default() };
    for shown in &collected.results {
        values.add(&shown.bundle, shown.is_main_result);
    }
    notes.extend(values.overflow());
    let is_bash = about.get("language").is_some_and(|language| language == Language::Bash.as_str());
    let exit_code = if is_bash { exit_code(collected, outcome) } else { None };
    let error = collected.error.as_ref().filter(|_| exit_code.is_none()).map(error_value);
    let ok = collected.ok(outcome);
    let mut structured = about;
    structured.extend(object(json!({
        "ok": ok,
        "stdout": stdout.shown,
        "stderr": stderr.shown,
        "stdout_bytes": ended.stdout_bytes,
        "stderr_bytes": ended.stderr_bytes,
        "results": values.list,
        "notes": notes,
        "state_lost": ended.state_lost,
        "duration_ms": ended.ran_ms,
    })));
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            structured.insert(key.to_owned(), value);
        }
    };
    put("error", error);
    put("exit_code", exit_code.map(Value::from));
    put("execution_count", outcome.count.map(Value::from));
    put("stdout_resource", stdout.link.as_ref().map(|link| link.uri.clone().into()));
    put("stderr_resource", stderr.link.as_ref().map(|link| link.uri.clone().into()));
    let text = page(&structured, &values);
    let links = [stdout.link, stderr.link].into_iter().flatten().collect();
    // As for run_command, the exit code of a shell is a result and no error of the tool.
    let is_error = !ok && exit_code.is_none();
    Ok(Answer { structured: Value::Object(structured), text, images: values.images, links, is_error })
}

/// What happened besides the results: lost state, and output that does not belong to the cell.
fn remarks(outcome: &CellOutcome, background: &str) -> Vec<String> {
    let mut notes: Vec<_> = outcome.trouble().map(|trouble| text::clean(&trouble)).into_iter().collect();
    if let Some(lost) = &outcome.started.lost {
        notes.push(format!("The state of earlier calls is lost: {}", text::line(lost, 500)));
    }
    if !background.is_empty() {
        notes.push(format!("Since the last call, something left over from earlier code wrote: {background}"));
    }
    if outcome.ended.stray_packets > 0 {
        notes.push("The code wrote to a descriptor of the interpreter itself; that was ignored.".to_owned());
    }
    notes
}

/// The exit code of Bash code that ran to its end.
fn exit_code(collected: &Collected, outcome: &CellOutcome) -> Option<u8> {
    if outcome.trouble().is_some() {
        return None;
    }
    match &collected.error {
        Some(error) if error.name == "ExitStatus" => error.value.parse().ok(),
        Some(_) => None,
        None => outcome.ok.then_some(0),
    }
}

/// The members of a JSON object.
pub fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

fn error_value(error: &CodeError) -> Value {
    let lines = error.traceback.len();
    let first = lines.saturating_sub(TRACEBACK);
    let traceback = error.traceback.get(first..).unwrap_or_default().join("\n");
    json!({
        "name": text::line(&error.name, 200),
        "value": text::cut(&text::clean(&error.value), FORM / 2).text,
        "traceback": text::cut(&text::clean(&traceback), FORM).text,
    })
}

/// The values of a cell, up to the limits of an answer.
#[derive(Default)]
struct Values {
    list: Vec<Value>,
    images: Vec<Image>,
    /// How many bytes of base64 are left for pictures, if that is limited.
    room: Option<usize>,
    used: usize,
    dropped: usize,
}

impl Values {
    fn add(&mut self, bundle: &Bundle, is_main_result: bool) {
        // The value of the last expression is never left out.
        if self.list.len() >= VALUES && !is_main_result {
            self.dropped += 1;
            return;
        }
        let mut data = Map::new();
        let mut image = None;
        let mut left_out: Vec<String> = bundle
            .omitted
            .iter()
            .take(VALUES)
            .map(|part| {
                let (mime, reason) = (text::line(&part.mime, 80), text::line(&part.reason, 200));
                format!("{mime} of {} bytes: {reason}", part.bytes)
            })
            .collect();
        for (mime, value) in &bundle.data {
            let name = text::line(mime, 80);
            if mime.starts_with("image/") && mime != "image/svg+xml" {
                if let Err(why) = self.picture(mime, value, &mut image) {
                    left_out.push(format!("{name}{why}"));
                }
                continue;
            }
            let form = match value {
                Value::String(form) => Value::String(text::clean(form)),
                other => other.clone(),
            };
            let size = form.as_str().map_or_else(|| form.to_string().len(), str::len);
            let is_text = mime == "text/plain";
            if size > FORM && is_text {
                let cut = text::cut(form.as_str().unwrap_or_default(), FORM);
                self.used += cut.text.len();
                data.insert(name, cut.text.into());
            } else if size > FORM || (self.used + size > FORMS && !is_main_result) {
                left_out.push(format!(
                    "{name} of {size} bytes: too long for an answer; write it to a file instead"
                ));
            } else {
                self.used += size;
                data.insert(name, form);
            }
        }
        let mut value = object(json!({ "is_main_result": is_main_result, "data": data }));
        value.extend(image.map(|index| ("image".to_owned(), index.into())));
        if !left_out.is_empty() {
            value.insert("left_out".to_owned(), json!(left_out));
        }
        self.list.push(Value::Object(value));
    }

    /// Adds the picture of a value, of which one is enough. The error is the reason why it is left out.
    fn picture(&mut self, mime: &str, value: &Value, image: &mut Option<usize>) -> Result<(), String> {
        let base64 = value.as_str().unwrap_or_default();
        let picture = Image::from_base64(mime, base64).map_err(|why| format!(": {why}"))?;
        if self.images.len() >= MAX_IMAGES {
            return Err(format!(": an answer has at most {MAX_IMAGES} pictures"));
        }
        if image.is_some() {
            return Ok(());
        }
        if self.room.is_some_and(|room| picture.length() > room) {
            let (_, bytes) = picture.describe();
            return Err(format!(
                " of {bytes} bytes: too large for an answer over HTTP; save it smaller, or as a file"
            ));
        }
        *image = Some(self.images.len());
        self.room = self.room.map(|room| room.saturating_sub(picture.length()));
        self.images.push(picture);
        Ok(())
    }

    fn overflow(&self) -> Option<String> {
        (self.dropped > 0)
            .then(|| format!("{} more values were displayed and are not in the answer.", self.dropped))
    }
}

/// The answer as text.
fn page(structured: &Map<String, Value>, values: &Values) -> String {
    let mut page = String::new();
    let mut section = |title: &str, body: &str| {
        if !body.is_empty() {
            let end = if body.ends_with('\n') { "" } else { "\n" };
            let _ = write!(page, "{title}:\n{body}{end}");
        }
    };
    let text_of = |key: &str| structured.get(key).and_then(Value::as_str).unwrap_or_default();
    section("stdout", text_of("stdout"));
    section("stderr", text_of("stderr"));
    for value in &values.list {
        let title = if value["is_main_result"] == true { "result" } else { "displayed" };
        section(title, &reading(value));
    }
    if let Some(error) = structured.get("error") {
        let traceback = error["traceback"].as_str().unwrap_or_default();
        let parts = [&error["name"], &error["value"]].map(|part| part.as_str().unwrap_or_default());
        let line = parts.join(": ");
        let line = line.trim_end_matches([':', ' ']);
        // Most tracebacks end with it; of a syntax error without the place, which is in a line above.
        let name = error["name"].as_str().unwrap_or_default();
        let is_told = |last: &str| !name.is_empty() && last.starts_with(name) && line.starts_with(last);
        if traceback.contains(line) || traceback.lines().any(is_told) {
            section("error", traceback);
        } else {
            section("error", format!("{traceback}\n{line}").trim_start_matches('\n'));
        }
    }
    for note in structured.get("notes").and_then(Value::as_array).into_iter().flatten() {
        section("note", note.as_str().unwrap_or_default());
    }
    if let Some(code) = structured.get("exit_code") {
        let _ = writeln!(page, "exit code: {code}");
    }
    if page.is_empty() {
        page.push_str("(no output)\n");
    }
    if let Some(id) = structured.get("sandbox_id").and_then(Value::as_str) {
        let _ = write!(page, "sandbox_id: {id}");
    }
    page
}

/// The form of a value that reads best.
fn reading(value: &Value) -> String {
    let data = &value["data"];
    let form = |mime: &str| data[mime].as_str().map(str::to_owned);
    let json = || data.get("application/json").map(Value::to_string);
    let plain = form("text/plain");
    let rich = || {
        let short = |text: &String| text.len() <= SHORT;
        form("text/html")
            .filter(short)
            .or_else(|| form("text/latex").filter(short))
            .or_else(|| json().filter(short))
    };
    let best = match plain {
        Some(text) if is_object_repr(&text) => rich().or(Some(text)),
        plain => plain,
    };
    let others = || ["text/latex", "text/html", "image/svg+xml"].iter().find_map(|mime| form(mime));
    let mut text = form("text/markdown").or(best).or_else(others).or_else(json).unwrap_or_default();
    if let Some(image) = value["image"].as_u64() {
        let _ = write!(text, " [image {image}]");
    }
    for part in value["left_out"].as_array().into_iter().flatten() {
        let _ = write!(text, "\n[left out: {}]", part.as_str().unwrap_or_default());
    }
    text
}

/// Whether a text is Python's `<module.Type object at 0x7f…>`, which does not describe the value.
fn is_object_repr(text: &str) -> bool {
    text.starts_with('<') && text.ends_with('>') && text.contains(" object at 0x") && !text.contains('\n')
}

#[cfg(test)]
mod tests {
    use bathy_client::interpreter::{CellEnd, CellStarted};
    use bathy_protocol::cell::CellEnded;

    use super::*;

    fn bundle(data: Value) -> Bundle {
        serde_json::from_value(json!({ "data": data })).unwrap()
    }

    #[test]
    fn forms_that_are_too_long_are_named_and_the_main_result_has_a_place() {
        let mut values = Values::default();
        values.add(
            &bundle(json!({"text/html": "x".repeat(FORM + 1), "text/plain": "y".repeat(FORM + 1)})),
            false,
        );
        assert!(values.list[0]["data"]["text/html"].is_null());
        assert!(values.list[0]["left_out"][0].as_str().unwrap().starts_with("text/html of 16385 bytes"));
        assert!(values.list[0]["data"]["text/plain"].as_str().unwrap().contains("bytes left out"));
        for _ in 0..1000 {
            values.add(&bundle(json!({"text/plain": "z".repeat(FORM)})), false);
        }
        values.add(&bundle(json!({"text/plain": "42"})), true);
        assert_eq!(values.list.last().unwrap()["data"]["text/plain"], "42");
        assert!(serde_json::to_string(&values.list).unwrap().len() < FORMS * 2);
        assert!(values.overflow().unwrap().starts_with("937 more"), "{:?}", values.overflow());
    }

    #[test]
    fn pictures_become_images_as_far_as_they_are_some() {
        let mut values = Values::default();
        for _ in 0..MAX_IMAGES + 1 {
            values.add(&bundle(json!({"image/png": "iVBORw0KGgoAAAAN", "text/plain": "<Figure>"})), false);
        }
        values.add(&bundle(json!({"image/png": "not one"})), true);
        assert_eq!(values.images.len(), MAX_IMAGES);
        assert_eq!(values.list[0]["image"], 0);
        assert!(values.list[MAX_IMAGES]["left_out"][0].as_str().unwrap().contains("at most 8 pictures"));
        assert!(values.list[MAX_IMAGES + 1]["left_out"][0].as_str().unwrap().contains("not what it says"));
        assert_eq!(reading(&values.list[1]), "<Figure> [image 1]");
        let mut narrow = Values { room: Some(20), ..Values::default() };
        for _ in 0..2 {
            narrow.add(&bundle(json!({"image/png": "iVBORw0KGgoAAAAN"})), false);
        }
        assert_eq!(narrow.images.len(), 1);
        assert!(
            narrow.list[1]["left_out"][0].as_str().unwrap().contains("too large for an answer over HTTP")
        );
    }

    #[test]
    fn an_error_reads_as_its_traceback() {
        let error = CodeError {
            name: "ValueError".into(),
            value: "bad \u{1b}[31mred".into(),
            traceback: vec!["Traceback".into(), "ValueError: bad \u{1b}[31mred".into()],
        };
        let structured =
            object(json!({"stdout": "", "stderr": "", "error": error_value(&error), "notes": []}));
        let page = page(&structured, &Values::default());
        assert_eq!(page, "error:\nTraceback\nValueError: bad red\n");
    }

    #[test]
    fn a_syntax_error_says_its_message_once() {
        let error = CodeError {
            name: "SyntaxError".into(),
            value: "invalid syntax (<cell 1>, line 1)".into(),
            traceback: vec!["  File \"<cell 1>\", line 1".into(), "SyntaxError: invalid syntax".into()],
        };
        let read =
            |error: &CodeError| page(&object(json!({ "error": error_value(error) })), &Values::default());
        let text = read(&error);
        assert_eq!(text.matches("invalid syntax").count(), 1, "{text}");
        // An error that its traceback does not name is named.
        let quiet = CodeError { traceback: vec!["SyntaxErrors".into()], ..error };
        let text = read(&quiet);
        assert!(text.contains("SyntaxError: invalid syntax (<cell 1>, line 1)"), "{text}");
    }

    #[test]
    fn a_value_is_shown_by_what_says_something() {
        let shown = |data: Value| reading(&json!({ "data": data }));
        let repr = "<IPython.core.display.HTML object at 0x4040af90>";
        assert_eq!(shown(json!({"text/plain": repr, "text/html": "<b>x</b>"})), "<b>x</b>");
        assert_eq!(shown(json!({"text/plain": repr, "application/json": {"a": 1}})), r#"{"a":1}"#);
        assert_eq!(shown(json!({"text/plain": repr, "text/html": "x".repeat(SHORT + 1)})), repr);
        assert_eq!(shown(json!({"text/plain": repr})), repr);
        assert_eq!(shown(json!({"text/plain": "   a\n0  1", "text/html": "<table>"})), "   a\n0  1");
        assert_eq!(shown(json!({"text/html": "<b>", "text/latex": "$x$"})), "$x$");
    }

    fn outcome(status: &str) -> CellOutcome {
        let ended = CellEnded {
            end: CellEnd::Finished(String::new()),
            interrupted: None,
            state_lost: false,
            stdout_bytes: 0,
            stderr_bytes: 0,
            background_bytes: 0,
            stray_packets: 0,
            ran_ms: 0,
        };
        CellOutcome { started: CellStarted::default(), ended, ok: status == "ok", count: None, damage: None }
    }

    #[test]
    fn an_exit_code_reads_as_that_of_a_command() {
        let structured = object(json!({ "stdout": "out\n", "exit_code": 3, "sandbox_id": "a" }));
        assert_eq!(page(&structured, &Values::default()), "stdout:\nout\nexit code: 3\nsandbox_id: a");
    }

    #[test]
    fn the_exit_code_of_a_shell_is_a_result() {
        let failed = |name: &str, value: &str| Collected {
            error: Some(CodeError { name: name.into(), value: value.into(), traceback: Vec::new() }),
            ..Collected::default()
        };
        assert_eq!(exit_code(&Collected::default(), &outcome("ok")), Some(0));
        assert_eq!(exit_code(&failed("ExitStatus", "3"), &outcome("error")), Some(3));
        assert_eq!(exit_code(&failed("SyntaxError", "bad"), &outcome("error")), None);
        let damaged = CellOutcome { damage: Some("x".into()), ..outcome("error") };
        assert_eq!(exit_code(&failed("ExitStatus", "3"), &damaged), None);
    }
}

//! What a cell brought, as an answer: shared by every tool that runs code.

use std::fmt::Write;

use bathy_client::interpreter::{Bundle, CellOutcome, CodeError, Collected};
use rmcp::model::Resource;
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Image, MAX_IMAGES};
use crate::call::Call;
use crate::error::ToolError;
use crate::outputs::{self, ONE};
use crate::schema::Field;
use crate::text;

/// The most of one form of a value in an answer.
const FORM: usize = 16 * 1024;
/// The most of all forms of all values in an answer.
const FORMS: usize = 128 * 1024;
/// How many values an answer has.
const VALUES: usize = 64;
/// How many lines of a traceback an answer has.
const TRACEBACK: usize = 60;

/// What the tools that run code return.
pub fn fields() -> Vec<Field> {
    vec![
        Field::boolean("ok", "Whether the code ran to its end without an error").required(),
        Field::text("stdout", "Standard output; of long output the beginning and the end").required(),
        Field::text("stderr", "Standard error, in the same way").required(),
        Field::integer("stdout_bytes", "How long standard output was in all").required().at_least(0),
        Field::integer("stderr_bytes", "How long standard error was in all").required().at_least(0),
        Field::text("stdout_resource", "Where the whole standard output can be read, if it is not all here"),
        Field::text("stderr_resource", "Where the whole standard error can be read, if it is not all here"),
        Field::objects(
            "results",
            "Displayed values and the value of the last expression, in their order",
            vec![
                Field::boolean("is_main_result", "Whether it is the value of the last expression").required(),
                Field::open("data", "Its forms by MIME type, as far as they are text").required(),
                Field::integer("image", "Which of the answer's image blocks shows it, from 0").at_least(0),
                Field::texts("left_out", "Forms that are not here, and why"),
            ],
        )
        .required(),
        Field::object(
            "error",
            "The error that ended the code",
            vec![
                Field::text("name", "Its type").required(),
                Field::text("value", "Its message").required(),
                Field::text("traceback", "Where it came from").required(),
            ],
        ),
        Field::texts("notes", "What else there is to know, such as that state was lost").required(),
        Field::boolean("state_lost", "Whether the interpreter ended, and its variables with it").required(),
        Field::integer("execution_count", "Which cell of its context it was").at_least(0),
        Field::integer("duration_ms", "How long the code ran").required().at_least(0),
    ]
}

/// One output on its way into an answer.
struct Stream {
    shown: String,
    link: Option<Resource>,
}

/// Keeps whole outputs that are too long to be shown.
pub struct Shelf<'a> {
    call: &'a Call,
    tool: &'a str,
    id: Option<String>,
}

impl<'a> Shelf<'a> {
    /// For the outputs of one call.
    pub fn new(call: &'a Call, tool: &'a str) -> Self {
        Self { call, tool, id: None }
    }

    /// The part of an output that an answer shows, and a link to the whole if that is longer. `total` is how long it
    /// was before anybody cut it.
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
            "\n[{kind} was {total} bytes{more}; it is not all shown here. Read {} for the whole.]",
            link.uri
        );
        Ok((shown, Some(link)))
    }

    fn stream(&mut self, kind: &str, output: &str, total: u64) -> Result<Stream, ToolError> {
        let (shown, link) = self.put(kind, output, total)?;
        Ok(Stream { shown, link })
    }
}

/// The answer to a cell. `about` is what the tool itself has to say.
pub fn answer(
    call: &Call,
    tool: &str,
    collected: &Collected,
    outcome: &CellOutcome,
    about: Map<String, Value>,
    mut notes: Vec<String>,
) -> Result<Answer, ToolError> {
    let ended = &outcome.ended;
    let mut shelf = Shelf::new(call, tool);
    let stdout = shelf.stream("stdout", &collected.stdout.text(), ended.stdout_bytes)?;
    let stderr = shelf.stream("stderr", &collected.stderr.text(), ended.stderr_bytes)?;
    let (background, _) = shelf.put("background", &collected.background.text(), ended.background_bytes)?;
    notes.extend(outcome.trouble().map(|trouble| text::clean(&trouble)));
    if let Some(lost) = &outcome.started.lost {
        notes.push(format!("The state of earlier calls is gone: {}", text::line(lost, 500)));
    }
    if !background.is_empty() {
        notes.push(format!("Since the last call, something left over from earlier code wrote: {background}"));
    }
    if ended.stray_packets > 0 {
        notes.push("The code wrote to a descriptor of the interpreter itself; that was ignored.".to_owned());
    }
    let mut values = Values { room: call.state.options.pictures, ..Values::default() };
    for shown in &collected.results {
        values.add(&shown.bundle, shown.is_main_result);
    }
    notes.extend(values.overflow());
    let error = collected.error.as_ref().map(error_value);
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
    put("execution_count", outcome.count.map(Value::from));
    put("stdout_resource", stdout.link.as_ref().map(|link| link.uri.clone().into()));
    put("stderr_resource", stderr.link.as_ref().map(|link| link.uri.clone().into()));
    let text = page(&structured, &values);
    let links = [stdout.link, stderr.link].into_iter().flatten().collect();
    Ok(Answer { structured: Value::Object(structured), text, images: values.images, links, is_error: !ok })
}

/// An object's members.
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

/// The values of a cell, as far as there is room for them.
#[derive(Default)]
struct Values {
    list: Vec<Value>,
    images: Vec<Image>,
    /// How much room is left for pictures, if that is limited.
    room: Option<usize>,
    used: usize,
    dropped: usize,
}

impl Values {
    fn add(&mut self, bundle: &Bundle, is_main_result: bool) {
        // The value of the last expression is what was asked for: it always has a place.
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
                match Image::from_base64(mime, value.as_str().unwrap_or_default()) {
                    Ok(_) if self.images.len() >= MAX_IMAGES => {
                        left_out.push(format!("{name}: an answer has at most {MAX_IMAGES} pictures"));
                    }
                    Ok(picture)
                        if image.is_none() && self.room.is_some_and(|room| picture.length() > room) =>
                    {
                        let (_, bytes) = picture.describe();
                        left_out.push(format!(
                            "{name} of {bytes} bytes: too large for an answer over HTTP; save it smaller, or as a file"
                        ));
                    }
                    // One picture of each value is enough.
                    Ok(_) if image.is_some() => {}
                    Ok(picture) => {
                        image = Some(self.images.len());
                        self.room = self.room.map(|room| room.saturating_sub(picture.length()));
                        self.images.push(picture);
                    }
                    Err(why) => left_out.push(format!("{name}: {why}")),
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

    fn overflow(&self) -> Option<String> {
        (self.dropped > 0)
            .then(|| format!("{} more values were displayed and are not in the answer.", self.dropped))
    }
}

/// The same for reading.
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
        // Most tracebacks end with it.
        if traceback.contains(line) {
            section("error", traceback);
        } else {
            section("error", format!("{traceback}\n{line}").trim_start_matches('\n'));
        }
    }
    for note in structured.get("notes").and_then(Value::as_array).into_iter().flatten() {
        section("note", note.as_str().unwrap_or_default());
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
    let best = ["text/markdown", "text/plain", "text/latex", "text/html", "image/svg+xml"];
    let mut text = best.iter().find_map(|mime| data[*mime].as_str()).map_or_else(
        || data.get("application/json").map(Value::to_string).unwrap_or_default(),
        str::to_owned,
    );
    if let Some(image) = value["image"].as_u64() {
        let _ = write!(text, " [image {image}]");
    }
    for part in value["left_out"].as_array().into_iter().flatten() {
        let _ = write!(text, "\n[left out: {}]", part.as_str().unwrap_or_default());
    }
    text
}

#[cfg(test)]
mod tests {
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
}

//! `read_output`: the rest of an output that was too long for an answer.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;

use super::{READS, Spec};
use crate::answer::Answer;
use crate::call::Call;
use crate::error::ToolError;
use crate::shown::object;

/// The most that one call reads, in bytes.
const MAX: u64 = 64 * 1024;

pub fn read_output() -> Spec {
    Spec::new(
        "read_output",
        "Read a long output",
        READS,
        "Reads from an output that was too long for its answer, of which 4 MiB are stored until newer ones need the space. Changes \
         nothing.",
        read,
    )
}

fn limit() -> u64 {
    16 * 1024
}

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    /// Its name, as in the answer that cut it
    #[schemars(length(min = 1, max = 128))]
    output: String,
    /// Where to begin, in bytes
    #[serde(default)]
    offset: u64,
    /// The most to read, in bytes
    #[serde(default = "limit")]
    #[schemars(range(min = 4, max = MAX))]
    limit: u64,
}

fn read(call: &Call, given: Arguments) -> Result<Answer, ToolError> {
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let part = call.state.outputs.part(&given.output, size(given.offset), size(given.limit));
    let part = part.ok_or_else(|| {
        ToolError::Failed(format!(
            "There is no output {:?}, or not any more: newer ones evict older ones. Run the code again, and write what it prints to a file.",
            crate::text::line(&given.output, 80)
        ))
    })?;
    let mut structured = object(json!({ "output": part.text, "total_bytes": part.total }));
    let mut text = part.text;
    if let Some(next) = part.next {
        structured.insert("next_offset".to_owned(), next.into());
        text.push_str(&format!("\n[{} bytes in all; go on with offset {next}]", part.total));
    } else {
        text.push_str("\n[end of the output]");
    }
    Ok(Answer::new(structured.into(), text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outputs;

    #[test]
    fn one_call_reads_no_more_than_an_answer_holds() {
        let most = read_output().input["properties"]["limit"]["maximum"].as_u64().unwrap();
        assert!(most <= u64::try_from(outputs::PART).unwrap());
    }
}

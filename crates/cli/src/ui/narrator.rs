//! Reports events of an ephemeral sandbox to its caller, while it runs and at its end.

use bathy_audit::{Event, What};
use bathy_runtime::supervisor::Observer;

use crate::ui::denials::Denials;
use crate::ui::{escape, output};

/// Reports network failures at once, and remembers denials.
#[derive(Debug, Default)]
pub struct Narrator {
    denials: Denials,
}

impl Narrator {
    /// Remembers denials in `denials`.
    pub fn new(denials: Denials) -> Self {
        Self { denials }
    }
}

impl Observer for Narrator {
    fn on_event(&mut self, event: &Event) {
        match &event.what {
            What::GatewayLost { restarted: true, .. } => output::note("the sandbox has a network again"),
            What::GatewayLost { reason, .. } => output::note(format_args!(
                "the sandbox has lost its network: its gateway failed: {}",
                escape::text(reason)
            )),
            _ => {}
        }
        self.denials.record(event);
    }

    fn on_backlog(&mut self, failure: &str) {
        output::note(format_args!("{failure}; until there is, nothing new begins in the sandbox's network"));
    }
}

//! The device's status: how far driver and device have come with each other.

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
const FAILED: u32 = 128;

/// There is a driver, and it knows how to use the device.
const DRIVES: u32 = ACKNOWLEDGE | DRIVER;
/// Driver and device have agreed on their features.
const AGREED: u32 = DRIVES | FEATURES_OK;

/// The bits that the driver has set, always in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Status(u32);

/// What a write to the status register asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing, or something that is not to be had now.
    None,
    /// The driver wrote zero: the device starts over.
    Reset,
    /// The driver gives up.
    Fail,
    /// The driver has found the device, or knows how to use it.
    Greet,
    /// The driver has chosen its features.
    Features,
    /// The driver has set everything up.
    Start,
}

impl Status {
    /// The status once a step has been made.
    pub(super) fn after(self, step: Step) -> Self {
        match step {
            Step::None => self,
            Step::Reset => Self::default(),
            Step::Fail => Self(self.0 | FAILED),
            Step::Greet if self.0 == 0 => Self(ACKNOWLEDGE),
            Step::Greet => Self(self.0 | DRIVER),
            Step::Features => Self(self.0 | FEATURES_OK),
            Step::Start => Self(self.0 | DRIVER_OK),
        }
    }

    /// What a driver that writes `bits` asks for. It may add the next bit, no other, and take none away.
    pub(super) fn step(self, bits: u32) -> Step {
        if bits == 0 {
            return Step::Reset;
        }
        if bits & self.0 != self.0 {
            return Step::None;
        }
        match (self.0, bits & !self.0) {
            (_, FAILED) => Step::Fail,
            (0, ACKNOWLEDGE) | (ACKNOWLEDGE, DRIVER) => Step::Greet,
            (DRIVES, FEATURES_OK) => Step::Features,
            (AGREED, DRIVER_OK) => Step::Start,
            _ => Step::None,
        }
    }

    pub(super) fn bits(self) -> u32 {
        self.0
    }

    /// Features may be chosen.
    pub(super) fn is_negotiating(self) -> bool {
        self.0 == DRIVES
    }

    /// Queues may be set up.
    pub(super) fn is_setting_up(self) -> bool {
        self.0 == AGREED
    }

    /// The driver has, at some time since the last reset, agreed with the device: the device knows of it.
    pub(super) fn has_agreed(self) -> bool {
        self.0 & FEATURES_OK != 0
    }

    pub(super) fn is_running(self) -> bool {
        self.0 == AGREED | DRIVER_OK
    }
}

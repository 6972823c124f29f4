//! Control messages: the only structured bytes of the console.

use super::ConsoleError;

/// The length of a control message without its payload.
pub(super) const CONTROL_BYTES: usize = 8;

/// The length of the longest control message.
pub(super) const MAX_MESSAGE_BYTES: usize = CONTROL_BYTES + super::PORT_NAME.len();

// Events of control messages, by their numbers in the virtio specification.
const DEVICE_READY: u16 = 0;
const PORT_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;

const PORT: u32 = 0;

/// A control message from the guest's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DriverMessage {
    DeviceReady(bool),
    PortReady(bool),
    PortOpen(bool),
}

impl DriverMessage {
    pub(super) fn parse(raw: [u8; CONTROL_BYTES]) -> Result<Self, ConsoleError> {
        let [p0, p1, p2, p3, e0, e1, v0, v1] = raw;
        let port = u32::from_le_bytes([p0, p1, p2, p3]);
        let event = u16::from_le_bytes([e0, e1]);
        let value = u16::from_le_bytes([v0, v1]) != 0;
        let message = match event {
            // The driver names no port in this one.
            DEVICE_READY => return Ok(Self::DeviceReady(value)),
            PORT_READY => Self::PortReady(value),
            PORT_OPEN => Self::PortOpen(value),
            _ => return Err(ConsoleError::UnknownControl(event)),
        };
        if port == PORT { Ok(message) } else { Err(ConsoleError::NoSuchPort(port)) }
    }
}

/// A control message to the guest's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostMessage {
    AddPort,
    NamePort(&'static str),
    SetOpen(bool),
}

impl HostMessage {
    pub(super) fn encode(self) -> Vec<u8> {
        let (event, value, payload) = match self {
            Self::AddPort => (PORT_ADD, 1, ""),
            Self::NamePort(name) => (PORT_NAME, 1, name),
            Self::SetOpen(open) => (PORT_OPEN, u16::from(open), ""),
        };
        let mut message = Vec::with_capacity(CONTROL_BYTES + payload.len());
        message.extend_from_slice(&PORT.to_le_bytes());
        message.extend_from_slice(&event.to_le_bytes());
        message.extend_from_slice(&value.to_le_bytes());
        message.extend_from_slice(payload.as_bytes());
        message
    }
}

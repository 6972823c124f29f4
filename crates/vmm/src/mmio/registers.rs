//! Which accesses there are to a device's page: to a register, to the configuration space, or to nothing.

/// How many bytes of guest-physical addresses one device takes.
pub const WINDOW_BYTES: u64 = 0x1000;

/// Where a driver writes a queue's number to have it looked at.
pub const QUEUE_NOTIFY: u64 = 0x50;

/// Where a driver reads why it was interrupted.
pub const INTERRUPT_STATUS: u64 = 0x60;

/// Where a driver writes that it has taken note.
pub const INTERRUPT_ACKNOWLEDGE: u64 = 0x64;

/// Where the configuration space starts.
const CONFIG_SPACE: u64 = 0x100;

/// What the registers' identification reads as: "virt".
pub(super) const MAGIC: u32 = 0x7472_6976;
/// The version of the registers' layout.
pub(super) const LAYOUT: u32 = 2;
/// Who made the device: "BTHY".
pub(super) const VENDOR: u32 = 0x5948_5442;
/// The length and the place of shared memory that does not exist.
pub(super) const NO_SHARED_MEMORY: u32 = u32::MAX;

/// A register that means something. Those of features that are not offered are left out, as is resetting one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Register {
    Magic,
    Layout,
    DeviceType,
    Vendor,
    DeviceFeatures,
    DeviceFeaturesSelect,
    DriverFeatures,
    DriverFeaturesSelect,
    QueueSelect,
    QueueSizeMax,
    QueueSize,
    QueueReady,
    QueueNotify,
    InterruptStatus,
    InterruptAcknowledge,
    Status,
    DescriptorsLow,
    DescriptorsHigh,
    AvailableLow,
    AvailableHigh,
    UsedLow,
    UsedHigh,
    SharedMemory,
    ConfigGeneration,
}

impl Register {
    fn at(offset: u64) -> Option<Self> {
        Some(match offset {
            0x000 => Self::Magic,
            0x004 => Self::Layout,
            0x008 => Self::DeviceType,
            0x00c => Self::Vendor,
            0x010 => Self::DeviceFeatures,
            0x014 => Self::DeviceFeaturesSelect,
            0x020 => Self::DriverFeatures,
            0x024 => Self::DriverFeaturesSelect,
            0x030 => Self::QueueSelect,
            0x034 => Self::QueueSizeMax,
            0x038 => Self::QueueSize,
            0x044 => Self::QueueReady,
            QUEUE_NOTIFY => Self::QueueNotify,
            INTERRUPT_STATUS => Self::InterruptStatus,
            INTERRUPT_ACKNOWLEDGE => Self::InterruptAcknowledge,
            0x070 => Self::Status,
            0x080 => Self::DescriptorsLow,
            0x084 => Self::DescriptorsHigh,
            0x090 => Self::AvailableLow,
            0x094 => Self::AvailableHigh,
            0x0a0 => Self::UsedLow,
            0x0a4 => Self::UsedHigh,
            0x0b0 | 0x0b4 | 0x0b8 | 0x0bc => Self::SharedMemory,
            0x0fc => Self::ConfigGeneration,
            _ => return None,
        })
    }
}

/// What an access is to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Register(Register),
    /// The configuration space, from this offset of its own on.
    Config(u32),
}

impl Target {
    /// What is at `offset` for an access of `width` bytes, if anything.
    pub(super) fn at(offset: u64, width: usize) -> Option<Self> {
        match offset.checked_sub(CONFIG_SPACE) {
            None if width == 4 => Register::at(offset).map(Self::Register),
            None => None,
            Some(place) => {
                let end = offset.checked_add(u64::try_from(width).ok()?)?;
                let fits = matches!(width, 1 | 2 | 4 | 8) && end <= WINDOW_BYTES;
                fits.then_some(Self::Config(u32::try_from(place).ok()?))
            }
        }
    }
}

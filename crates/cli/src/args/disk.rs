//! Options that limit a sandbox's disk bandwidth. As with the network, one option replaces the whole section of the file.

use bathy_spec::{DiskLimits, Size};

/// The disk limits given as options.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct DiskArgs {
    /// Bytes per second that the sandbox may write to its disk, at least 1M. Bursts of four seconds' worth, or of 16M if that is
    /// more, are allowed. Any of the three disk limits replaces the file's section `disk_limits`. [default: 128M]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    disk_write_bandwidth: Option<Size>,
    /// Bytes per second that the sandbox may read from its image, and as many from its disk, with the same bursts.
    /// [default: no limit]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    disk_read_bandwidth: Option<Size>,
    /// Times per second that the sandbox may flush its disk to stable storage, at least 10, with bursts of four seconds' worth.
    /// An fsync usually takes two flushes. [default: 500]
    #[arg(long, value_name = "NUMBER", help_heading = "Limits")]
    disk_flushes: Option<u32>,
}

impl DiskArgs {
    /// The limits, if any option sets one.
    pub fn limits(&self) -> Option<DiskLimits> {
        let Self { disk_write_bandwidth, disk_read_bandwidth, disk_flushes } = *self;
        if disk_write_bandwidth.is_none() && disk_read_bandwidth.is_none() && disk_flushes.is_none() {
            return None;
        }
        let usual = DiskLimits::default();
        Some(DiskLimits {
            write_bandwidth: disk_write_bandwidth.unwrap_or(usual.write_bandwidth),
            read_bandwidth: disk_read_bandwidth.or(usual.read_bandwidth),
            flushes: disk_flushes.unwrap_or(usual.flushes),
        })
    }
}

//! The options that say how fast a sandbox may use its disks. One of them replaces what a file says of that as a whole, as
//! those of the network do.

use bathy_spec::{DiskLimits, Size};

/// How fast disks may be used, in options.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct DiskArgs {
    /// The most bytes that the sandbox writes to its disk in a second, at least 1M; after a pause four seconds' worth, or 16M if
    /// that is more, at once. Each of the three limits given here replaces the file's section `disk_limits`. [default: 128M]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    disk_write_bandwidth: Option<Size>,
    /// The most bytes that the sandbox reads from its image, and as many from its disk, in a second; at once as with writing.
    /// [default: no limit]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    disk_read_bandwidth: Option<Size>,
    /// How often the sandbox may flush its disk to stable storage in a second, at least 10; four seconds' worth at once. An
    /// fsync is two flushes as a rule. [default: 500]
    #[arg(long, value_name = "NUMBER", help_heading = "Limits")]
    disk_flushes: Option<u32>,
}

impl DiskArgs {
    /// The limits, if any option says one.
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

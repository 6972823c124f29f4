//! Checks what this machine offers, with hints for what is missing.

use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use bathy_image::store::CacheState;
use bathy_image::{ImageCache, Recipe};
use bathy_jail::cgroup::{Cgroup, CgroupLimits, Enforcement, describe_weight};
use bathy_jail::filter::KILLS;
use bathy_jail::spawn::{Tried, try_filter};
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use bathy_spec::{Chosen, SandboxSpec, host};
use serde::Serialize;

use crate::kvm_probe::KvmSupport;
use crate::{assets, engine, identity, sys};

const GIB: u64 = 1 << 30;
/// Disk space for the cache and a few disks.
const DISK_NEEDED: u64 = 3 * GIB;
/// Installing a filter takes less than a millisecond.
const FILTER_LIMIT: Duration = Duration::from_secs(10);

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// As it should be.
    Ok,
    /// Not needed, or not optimal.
    Note,
    /// Sandboxes run with less protection than intended.
    Warning,
    /// Sandboxes will not run.
    Failed,
}

#[derive(Clone, Debug, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub status: CheckStatus,
    pub found: String,
    /// How to fix it.
    pub hint: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: CheckStatus::Ok, found: found.into(), hint: None }
    }

    fn note(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: CheckStatus::Note, found: found.into(), hint: None }
    }

    fn warning(name: &'static str, found: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { name, status: CheckStatus::Warning, found: found.into(), hint: Some(hint.into()) }
    }

    fn failed(name: &'static str, found: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { name, status: CheckStatus::Failed, found: found.into(), hint: Some(hint.into()) }
    }
}

/// The results of all checks.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    pub healthy: bool,
    /// The engine that a sandbox gets by default. None if the required engine cannot be used.
    pub engine: Option<Chosen>,
    pub engine_reason: String,
    /// The result of the KVM probe.
    pub kvm: KvmSupport,
    pub checks: Vec<Check>,
}

pub fn examine(paths: &Paths) -> Diagnosis {
    // In parallel: the probe waits for a guest that may not finish, and checking the cache may take as long.
    let ((choice, kvm), mut checks) = thread::scope(|scope| {
        let probe = scope.spawn(|| engine::examine(paths));
        let checks = checks(paths);
        (probe.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), checks)
    });
    let (engine, engine_reason) = match choice {
        Ok(choice) => (Some(choice.engine), choice.reason),
        Err(error) => {
            let hint = format!("unset {} in the environment, or change it", engine::VARIABLE);
            checks.push(Check::failed("engine", error.to_string(), hint));
            (None, error.to_string())
        }
    };
    let store = ImageCache::new(paths.cache.clone());
    checks.extend(Chosen::ALL.map(|of| kernel(&store, of, engine)));
    checks.push(kvm_check(&kvm));
    let healthy = checks.iter().all(|check| check.status != CheckStatus::Failed);
    Diagnosis { healthy, engine, engine_reason, kvm, checks }
}

/// The checks that do not depend on the engine.
fn checks(paths: &Paths) -> Vec<Check> {
    let store = ImageCache::new(paths.cache.clone());
    let mut checks = vec![
        user_namespaces(),
        user_numbers(),
        seccomp(),
        landlock(),
        memory(),
        disk("cache folder", &paths.cache),
        disk("state folder", &paths.state),
        programs(),
        file_system_tool(),
        operators_file(),
    ];
    checks.extend(cgroups());
    let images = Recipe::images().filter_map(|name| Recipe::image(name).ok());
    checks.extend(images.map(|recipe| artifact("image", &store, &recipe)));
    checks
}

fn operators_file() -> Check {
    const NAME: &str = "operator's settings";
    match Operator::load() {
        Ok(_) => Check::ok(NAME, "can be used"),
        Err(error) => Check::failed(
            NAME,
            bathy_protocol::chain(&error),
            "correct the file: until then nothing is started or entered",
        ),
    }
}

fn user_namespaces() -> Check {
    const NAME: &str = "user namespaces";
    match bathy_jail::spawn::try_namespaces() {
        Ok(()) => Check::ok(NAME, "can be created"),
        Err(error) => Check::failed(NAME, "cannot be created", error.to_string()),
    }
}

/// Whether sandboxes can have their own user ids, which root's sandboxes require.
fn user_numbers() -> Check {
    const NAME: &str = "user numbers";
    if !rustix::process::geteuid().is_root() {
        return Check::ok(NAME, "sandboxes have those of /etc/subuid, or else your own");
    }
    match identity::missing_of_root() {
        None => {
            Check::ok(NAME, format!("each sandbox has three of its own, of {}", identity::range_of_root()))
        }
        Some(missing) => Check::failed(
            NAME,
            format!("this user namespace does not have {missing}, of which root's sandboxes have theirs"),
            "use a container that has these numbers, or run bathy as an ordinary user",
        ),
    }
}

fn seccomp() -> Check {
    const NAME: &str = "seccomp";
    const NEEDED: [&str; 3] = ["errno", "trap", "kill_process"];
    let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if !NEEDED.iter().all(|needed| actions.split_whitespace().any(|action| action == *needed)) {
        return Check::failed(
            NAME,
            format!("the kernel offers only: {}", actions.trim()),
            "use a kernel with CONFIG_SECCOMP_FILTER, 4.14 or later",
        );
    }
    if !KILLS {
        let found = "this build logs the calls for which its filters should kill (feature log-filter)";
        return Check::failed(NAME, found, "build it with ./bathy");
    }
    match try_filter(FILTER_LIMIT) {
        Ok(Tried::Installed) => Check::ok(NAME, "filters with errno, trap and kill_process"),
        Ok(Tried::Refused) => Check::failed(NAME, "a filter was refused", "allow seccomp() where bathy runs"),
        Ok(Tried::Stuck) => Check::failed(
            NAME,
            format!("the kernel is stuck: a filter was not installed after {} s", FILTER_LIMIT.as_secs()),
            "restart this machine",
        ),
        Err(error) => Check::failed(NAME, error.to_string(), "check the limit of processes"),
    }
}

fn landlock() -> Check {
    match sys::landlock_version() {
        Some(version) => {
            Check::note("Landlock", format!("version {version}; not needed: jails have an empty root"))
        }
        None => Check::note("Landlock", "not offered; not needed: jails have an empty root"),
    }
}

/// Creates a control group to check whether that works.
fn cgroups() -> Vec<Check> {
    const NAME: &str = "cgroups";
    let limits =
        CgroupLimits { cpu_weight: true, memory: Some(GIB), pids: Some(100), ..CgroupLimits::default() };
    match Cgroup::create(&format!("doctor-{}", std::process::id()), &limits) {
        Ok(group) => {
            vec![cgroups_check(NAME, group.enforced()), processor_time(&describe_weight(&group))]
        }
        Err(error) => vec![Check::warning(NAME, error.to_string(), NO_GROUP)],
    }
}

/// Whether all processes of a guest together get the scheduler weight of one.
fn processor_time(by: &str) -> Check {
    const NAME: &str = "processor time";
    match (by.strip_prefix("none: "), by.strip_prefix("session: ")) {
        (Some(why), _) => Check::warning(
            NAME,
            format!(
                "the processes of a uml guest compete one by one: many of them crowd out its neighbours ({why})"
            ),
            "as for control groups; or `sysctl kernel.sched_autogroup_enabled=1`, where bathy runs in no cpu cgroup; or fewer --processes",
        ),
        (None, Some(why)) => {
            Check::ok(NAME, format!("a uml guest competes as one, because it is one session ({why})"))
        }
        (None, None) => Check::ok(NAME, format!("a guest competes as one, by the weight of a {by}")),
    }
}

/// The hint for a machine without usable control groups.
const NO_GROUP: &str = "run untrusted code as root, or as a user whom systemd gives control groups (a login with `systemctl --user` running); each process of a sandbox has its own limits meanwhile, and all of them together have none";

fn cgroups_check(name: &'static str, enforced: &Enforcement) -> Check {
    let Enforcement { memory, processes, .. } = enforced;
    let missing: Vec<_> = [("memory", memory), ("processes", processes)]
        .into_iter()
        .filter_map(|(what, by)| Some(format!("{what} ({})", by.strip_prefix("none: ")?)))
        .collect();
    if missing.is_empty() {
        return Check::ok(name, format!("memory by {memory}, processes by {processes}"));
    }
    Check::warning(name, format!("NO LIMIT for a sandbox as a whole: {}", missing.join(", ")), NO_GROUP)
}

fn memory() -> Check {
    const NAME: &str = "memory";
    let (available, needed) = (host::available_memory(), SandboxSpec::default().memory.0);
    let found = format!("{} MiB available of {} MiB", available >> 20, host::total_memory() >> 20);
    if available >= needed {
        Check::ok(NAME, found)
    } else {
        Check::failed(
            NAME,
            found,
            format!("free some: a default sandbox may use {} MiB; or use --memory 128M", needed >> 20),
        )
    }
}

fn disk(name: &'static str, folder: &Path) -> Check {
    let existing = folder.ancestors().find(|path| path.exists()).unwrap_or(folder);
    match rustix::fs::statvfs(existing) {
        Ok(data) => {
            let free = data.f_bavail.saturating_mul(data.f_frsize);
            let found = format!("{} MiB free in {}", free >> 20, folder.display());
            if free >= DISK_NEEDED {
                Check::ok(name, found)
            } else {
                let variable = if name.starts_with("cache") { "XDG_CACHE_HOME" } else { "XDG_STATE_HOME" };
                Check::failed(
                    name,
                    found,
                    format!("free {} MiB there, or set {variable} to another disk", DISK_NEEDED >> 20),
                )
            }
        }
        Err(error) => {
            Check::failed(name, format!("{}: {error}", folder.display()), "make the folder, or set HOME")
        }
    }
}

fn programs() -> Check {
    const NAME: &str = "programs";
    let missing: Vec<_> = ["bathy-keeper", "bathy-gateway", "bathy-agent", "bathy-unpack"]
        .into_iter()
        .filter(|name| assets::program(name).is_err())
        .collect();
    if missing.is_empty() {
        Check::ok(NAME, "keeper, gateway, agent and unpacker are beside bathy")
    } else {
        Check::failed(
            NAME,
            format!("{} not found beside bathy", missing.join(", ")),
            "build with ./bathy or `cargo build --release`",
        )
    }
}

fn file_system_tool() -> Check {
    let found = ["/usr/sbin/mke2fs", "/sbin/mke2fs", "/usr/bin/mke2fs"]
        .into_iter()
        .find(|path| Path::new(path).exists());
    match found {
        Some(path) => Check::ok("mke2fs", path),
        None => Check::failed("mke2fs", "not found", "apt-get install e2fsprogs"),
    }
}

fn artifact(name: &'static str, store: &ImageCache, recipe: &Recipe) -> Check {
    match store.lookup(recipe) {
        CacheState::Absent => Check::note(
            name,
            format!("{} is not built yet; the first run builds it, or `bathy setup`", recipe.title),
        ),
        CacheState::Usable(artifact) | CacheState::Unverified(artifact) => match store.verify(&artifact) {
            Ok(true) => {
                Check::ok(name, format!("{} {}, digest right", recipe.title, artifact.manifest.version))
            }
            Ok(false) => Check::failed(
                name,
                format!("{} is damaged", recipe.title),
                "run `bathy setup`: it is built again",
            ),
            Err(error) => Check::failed(name, error.to_string(), "check the cache folder's permissions"),
        },
    }
}

/// Checks the guest kernel of one engine; the kernel of an unused engine need not exist.
fn kernel(store: &ImageCache, of: Chosen, used: Option<Chosen>) -> Check {
    let name = match of {
        Chosen::Kvm => "guest kernel (kvm)",
        Chosen::Uml => "guest kernel (uml)",
    };
    let recipe = assets::kernel_recipe(of);
    let check = artifact(name, store, &recipe);
    if used.is_none_or(|used| used == of) {
        return check;
    }
    let engine = of.as_str();
    match store.lookup(&recipe) {
        CacheState::Absent => Check::note(
            name,
            format!(
                "{} is not built, and only --engine {engine} needs it; `bathy setup --engine {engine}` builds it",
                recipe.title
            ),
        ),
        _ => Check {
            status: CheckStatus::Note,
            found: format!("{}; only --engine {engine} needs it", check.found),
            ..check
        },
    }
}

fn kvm_check(support: &KvmSupport) -> Check {
    const NAME: &str = "KVM";
    if support.is_hardware() {
        Check::ok(NAME, support.to_string())
    } else {
        Check { hint: support.hint(), ..Check::note(NAME, support.to_string()) }
    }
}

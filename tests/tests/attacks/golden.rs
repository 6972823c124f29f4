//! J1, J4, J8: the state of each process of a sandbox in /proc, compared with the golden files.
//!
//! After a deliberate change, `BATHY_BLESS=1` writes the files in tests/golden anew; the difference is then reviewed.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use bathy_jail::filter::{
    Condition, Filter, GATEWAY, GUEST_PTRACE, GUEST_SECCOMP, GuestFilter, KEEPER, KEEPER_KVM, KILLS,
    Otherwise, Test, UNPACKER, VCPU,
};
use bathy_runtime::images::unpacker::Unpacker;
use bathy_tests::kept::{Home, until};
use bathy_tests::{bathy, repository};

use crate::process::Process;
use crate::run::Run;
use crate::user::{NOBODY, ordinary_user};

/// Where root's sandboxes have their users, and where their gateways have.
const FIRST_SANDBOX_USER: u32 = 0x7800_0000;
const FIRST_GATEWAY_USER: u32 = 0x7c00_0000;

pub fn assert_golden(name: &str, found: &str) {
    let file = format!("{name}.txt");
    let path = repository().join("tests/golden").join(&file);
    if std::env::var_os("BATHY_BLESS").is_some() {
        // In the nested test bed the repository cannot be written to; what is left there is brought out.
        let brought_out = std::env::var_os("BED_RESULTS").map(|folder| Path::new(&folder).join(file));
        fs::write(brought_out.as_ref().unwrap_or(&path), found).expect("the folder can be written to");
        return;
    }
    let agreed = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; BATHY_BLESS=1 writes it", path.display()));
    let gone = agreed
        .lines()
        .filter(|line| !found.lines().any(|other| other == *line))
        .map(|line| format!("- {line}\n"));
    let new = found
        .lines()
        .filter(|line| !agreed.lines().any(|other| other == *line))
        .map(|line| format!("+ {line}\n"));
    let difference: String = gone.chain(new).collect();
    assert!(agreed == found, "{name} differs from {}:\n{difference}", path.display());
}

fn assert_processes(suffix: &str, start: impl FnOnce(&[&str]) -> Run, mode: &str) {
    let mut run = start(&["--uml-mode", mode, "--", "sh", "-c", "echo up; sleep 60"]);
    run.when_printed("up");
    // The guest kernel makes some of its descriptors when it first needs them.
    sleep(Duration::from_millis(500));
    let family = run.look();
    let (keeper, guest) = (family.keeper.expect("the keeper runs"), family.guest.expect("the guest runs"));
    assert_golden(&format!("keeper-{suffix}"), &describe(keeper, run.number()));
    assert_golden(&format!("guest-{suffix}"), &describe(guest, run.number()));
    let gateway = family.gateway.expect("the gateway runs");
    assert_golden(&format!("gateway-{suffix}"), &describe(gateway, run.number()));
    let mut stubs: Vec<_> = family.stubs.iter().map(|stub| describe(*stub, run.number())).collect();
    assert!(!stubs.is_empty(), "no guest program runs");
    // Whatever the guest runs, its host processes are alike.
    stubs.sort_unstable();
    stubs.dedup();
    assert_golden(&format!("stub-{suffix}"), &stubs.join("\nor:\n"));
}

#[test]
fn j1_j4_j8_processes_are_confined_as_agreed() {
    assert_processes("seccomp", Run::start, "seccomp");
}

#[test]
fn j1_j4_j8_processes_are_confined_as_agreed_in_ptrace_mode() {
    assert_processes("ptrace", Run::start, "ptrace");
}

#[test]
fn j1_j4_j8_an_ordinary_users_processes_are_confined_as_agreed() {
    let user = ordinary_user();
    assert_processes("ordinary-user", |arguments| user.start(arguments), "seccomp");
}

/// A sandbox that is kept has more descriptors: its life lock, its logs, its parking place. Everything else is the same.
#[test]
fn j1_j4_j8_processes_of_a_kept_sandbox_are_confined_as_agreed() {
    let home = Home::new();
    home.started("kept", &[]);
    home.exec("kept", &["true"]);
    // The client that just left has a descriptor until the keeper notices.
    sleep(Duration::from_millis(500));
    let caller = home.monitor("kept");
    let gateway = home.gateway("kept").expect("its gateway runs");
    for (name, number) in
        [("keeper", home.keeper("kept")), ("guest", home.guest("kept")), ("gateway", gateway)]
    {
        let process = Process::of(number).expect("it runs");
        assert_golden(&format!("{name}-kept"), &describe(process, caller));
    }
}

/// A layer that never arrives keeps the process where it reads hostile bytes.
#[test]
fn j1_j4_j8_the_process_that_unpacks_a_layer_is_confined_as_agreed() {
    let (blob, _never) = std::io::pipe().expect("a pipe");
    let blob = fs::File::from(std::os::fd::OwnedFd::from(blob));
    let program = fs::File::open(bathy().with_file_name("bathy-unpack")).expect("./test builds it");
    let unpacking = Unpacker::new(program).start(&blob).expect("it starts");
    // Its last step before it reads is its filter.
    let process = Process::of(unpacking.pid()).expect("it runs");
    until("it is confined", 10, || process.status_number("Seccomp") == 2);
    assert_golden("unpacker", &describe(process, std::process::id()));
}

/// The description of an unconfined process differs everywhere: the files above can fail.
#[test]
fn j1_an_unconfined_process_is_noticed() {
    let mut run = Run::of(std::process::Command::new("sh").args(["-c", "echo up; sleep 60; :"]));
    let sleeper = run.when_printed("up").keeper.expect("sleep runs");
    // It opens and closes its libraries first.
    sleep(Duration::from_millis(500));
    let found = describe(sleeper, run.number());
    let path = repository().join("tests/golden/guest-seccomp.txt");
    let agreed = fs::read_to_string(path).unwrap_or_default();
    let same: Vec<_> = agreed.lines().filter(|line| found.lines().any(|other| other == *line)).collect();
    let telling = ["namespaces", "users", "CapBnd", "CapEff", "NoNewPrivs", "Seccomp", "mount"];
    let same: Vec<_> = same.iter().filter(|line| telling.iter().any(|word| line.starts_with(word))).collect();
    assert!(same.is_empty(), "an unconfined process has these too: {same:?}");
}

#[test]
fn j2_filters_are_as_agreed() {
    let GuestFilter::ByAddress(seccomp) = GUEST_SECCOMP else { panic!("calls are trapped by their address") };
    let guests = [
        ("guest-seccomp", seccomp.kernel),
        ("guest-stub", seccomp.stub),
        ("guest-ptrace", *GUEST_PTRACE.kernel()),
    ];
    for (name, filter) in [KEEPER, KEEPER_KVM, VCPU, GATEWAY, UNPACKER]
        .map(|filter| (filter.name, filter))
        .into_iter()
        .chain(guests)
    {
        assert_golden(&format!("filter-{name}"), &describe_filter(&filter));
    }
}

fn describe_filter(filter: &Filter) -> String {
    let condition = |condition: &Condition| match condition.test {
        Test::Is(value) => format!("argument {} is {value:#x}", condition.argument),
        Test::Without(mask) => format!("argument {} has none of {mask:#x}", condition.argument),
        Test::Masked { mask, value } => {
            format!("argument {} has {value:#x} of {mask:#x}", condition.argument)
        }
        Test::Wide { mask, value } => {
            format!("argument {} has {value:#x} of {mask:#x}, in 64 bits", condition.argument)
        }
    };
    // A build that logs instead of killing differs in the first line of every table that kills.
    let otherwise = match filter.otherwise {
        Otherwise::Kill if !KILLS => "Log".to_owned(),
        otherwise => format!("{otherwise:?}"),
    };
    let mut text = format!("otherwise: {otherwise}\n");
    for group in filter.groups {
        let _ = writeln!(text, "to {}:", group.purpose);
        for rule in group.rules {
            let _ = writeln!(text, "  {} ({})", rule.name, rule.call);
            for form in rule.forms {
                let form: Vec<_> = form.iter().map(condition).collect();
                let _ = writeln!(text, "    if {}", form.join(" and "));
            }
        }
    }
    text
}

/// `caller` is the process whose limits are not ours.
pub fn describe(process: Process, caller: u32) -> String {
    let mut text = String::new();
    let mut say = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    let exe = process.link("exe");
    say(format!("program: {}", Path::new(&exe).file_name().unwrap_or_default().to_string_lossy()));
    say(format!("arguments: {}", process.file("cmdline").trim_end_matches('\0').replace('\0', " ")));
    say(format!("environment: {} bytes", process.file("environ").len()));
    say(format!("namespaces of its own: {}", namespaces(process)));
    say(format!("users: {}", map(&process.file("uid_map"))));
    say(format!("groups: {}", map(&process.file("gid_map"))));
    let folder = fs::metadata(format!("/proc/{}/mem", process.number)).expect("it runs");
    say(format!("its files in /proc belong to: {}", user(folder.uid())));
    status(process, &mut say);
    limits(process, caller, &mut say);
    for line in process.file("mountinfo").lines() {
        say(format!("mount: {}", mount(line)));
    }
    say(format!("root: {}, working folder: {}", process.link("root"), process.link("cwd")));
    let inside = fs::read_dir(format!("/proc/{}/root", process.number)).expect("root may look").count();
    say(format!("files in its root: {}", if inside > 0 { "some" } else { "none" }));
    descriptors(process, &mut say);
    text
}

fn namespaces(process: Process) -> String {
    let kinds = ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];
    let ours = |kind: &str| fs::read_link(format!("/proc/self/ns/{kind}")).expect("a namespace");
    let differs = |kind: &&str| process.link(&format!("ns/{kind}")) != ours(kind).to_string_lossy();
    kinds.into_iter().filter(differs).collect::<Vec<_>>().join(" ")
}

/// A user's number, as far as it does not depend on which slot the sandbox has.
fn user(number: u32) -> String {
    if number == NOBODY {
        return "the caller".to_owned();
    }
    if number >= FIRST_GATEWAY_USER {
        return "sandbox gateway".to_owned();
    }
    match number.checked_sub(FIRST_SANDBOX_USER) {
        Some(offset) => format!("sandbox {}", if offset % 2 == 0 { "keeper" } else { "guest" }),
        None => number.to_string(),
    }
}

fn map(text: &str) -> String {
    let line = |line: &str| {
        let fields: Vec<u32> = line.split_whitespace().filter_map(|field| field.parse().ok()).collect();
        match fields.as_slice() {
            [inside, outside, count] => format!("{inside} is {} and {} more", user(*outside), count - 1),
            _ => line.to_owned(),
        }
    };
    let lines: Vec<_> = text.lines().map(line).collect();
    if lines.is_empty() { "nobody".to_owned() } else { lines.join(", ") }
}

fn status(process: Process, say: &mut impl FnMut(String)) {
    let ours = fs::read_to_string("/proc/self/status").expect("our own file");
    let our_filters = field(&ours, "Seccomp_filters").trim().parse::<u64>().unwrap_or(0);
    let theirs = process.file("status");
    for name in ["Uid", "Gid", "Groups"] {
        let users: Vec<_> = field(&theirs, name)
            .split_whitespace()
            .map(|id| id.parse().map_or_else(|_| id.to_owned(), user))
            .collect();
        say(format!("{name}: {}", users.join(", ")));
    }
    for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"] {
        say(format!("{name}: {}", field(&theirs, name).trim()));
    }
    say(format!("filters: {}", process.status_number("Seccomp_filters") - our_filters));
    say(format!("threads: {}", field(&theirs, "Threads").trim()));
    say(format!("pid namespaces: {}", field(&theirs, "NSpid").split_whitespace().count()));
    let cpus = |status: &str| {
        let words = field(status, "Cpus_allowed").trim().replace(',', "");
        words.chars().filter_map(|digit| digit.to_digit(16)).map(u32::count_ones).sum::<u32>()
    };
    say(format!(
        "processors: {}",
        if cpus(&theirs) == cpus(&ours) { "all".to_owned() } else { cpus(&theirs).to_string() }
    ));
}

pub fn field<'a>(status: &'a str, name: &str) -> &'a str {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap_or_default()
}

fn limits(process: Process, caller: u32, say: &mut impl FnMut(String)) {
    let callers = fs::read_to_string(format!("/proc/{caller}/limits")).expect("it runs");
    for line in process.file("limits").lines().skip(1) {
        let name = line.get(..26).unwrap_or(line).trim_end();
        let values: Vec<_> = line.get(26..).unwrap_or_default().split_whitespace().take(2).collect();
        // What is not limited is the caller's own limit, whatever that is.
        if values == ["0", "0"] || !callers.lines().any(|other| other == line) {
            say(format!("limit: {name}: {}", values.join(" ")));
        } else {
            say(format!("limit: {name}: the caller's"));
        }
    }
}

/// A line of mountinfo without numbers that change.
fn mount(line: &str) -> String {
    let words = line.split_whitespace().skip(3).map(|word| {
        // How a kernel numbers the files of a tmpfs is its own affair.
        let options = word.split(',').filter(|option| *option != "inode64");
        let options = options.map(|option| match option.split_once('=') {
            Some((name @ ("uid" | "gid"), id)) => {
                format!("{name}={}", id.parse().map_or_else(|_| id.to_owned(), user))
            }
            _ => option.to_owned(),
        });
        options.collect::<Vec<_>>().join(",")
    });
    words.collect::<Vec<_>>().join(" ")
}

fn descriptors(process: Process, say: &mut impl FnMut(String)) {
    /// The last descriptor that a guest kernel is started with.
    const LAST_GIVEN: u32 = 11;
    let of_guest = process.file("cmdline").starts_with("bathysphere-guest");
    let folder = format!("/proc/{}/fd", process.number);
    let mut numbers: Vec<u32> = fs::read_dir(folder)
        .expect("root may look")
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    numbers.sort_unstable();
    // How many descriptors a guest kernel makes for itself depends on what it runs; which kinds does not.
    let mut made = BTreeSet::new();
    for number in numbers {
        let info = process.file(&format!("fdinfo/{number}"));
        let flags = field(&info, "flags").trim();
        let access = match flags.chars().last() {
            Some('0') => "r",
            Some('1') => "w",
            _ => "rw",
        };
        let target = format!("{access} {}", target(&process.link(&format!("fd/{number}"))));
        if of_guest && number > LAST_GIVEN {
            made.insert(target);
        } else {
            say(format!("descriptor {number}: {target}"));
        }
    }
    for target in made {
        say(format!("descriptors of its own making: {target}"));
    }
}

fn target(link: &str) -> String {
    if let Some((kind @ ("pipe" | "socket"), _)) = link.split_once(':') {
        return kind.to_owned();
    }
    if link.starts_with("/memfd:") || link.starts_with("/dev/") || !link.starts_with('/') {
        return link.to_owned();
    }
    let name = link.rsplit('/').next().unwrap_or_default();
    // A file without a name is shown by its inode's number.
    if name.starts_with('#') { "a file without a name".to_owned() } else { format!("…/{name}") }
}

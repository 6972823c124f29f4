//! Every access, of every width, with values of every kind, in every state that a device can be in.

use super::super::MmioState;
use super::super::registers::Target;
use super::*;

const LEGAL: [u32; 5] = [0, ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK];
const WIDTHS: [usize; 7] = [0, 1, 2, 3, 4, 8, 16];

/// Values for every register: the status' own, queue numbers and sizes, places in memory, and the ends of types.
const VALUES: [u32; 27] = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    0xb,
    0xf,
    0x10,
    0x40,
    0x4b,
    0x80,
    0x8b,
    0x8f,
    0xff,
    0x100,
    0x101,
    0x1000,
    0x9000,
    0xffff,
    0x1_0000,
    0x1_0100,
    0x2000_0000,
    0x8000_0000,
    u32::MAX,
];

/// How to get a device into some state.
type Prepare = fn(&mut Guest<Console>, &mut [Driver<'_>]);

const STATES: [(&str, Prepare); 17] = [
    ("fresh", |_, _| {}),
    ("given up at once", |g, _| g.put_all(&[(STATUS, FAILED)])),
    ("found", |g, _| g.put_all(&[(STATUS, ACKNOWLEDGE)])),
    ("found and given up", |g, _| g.put_all(&[(STATUS, ACKNOWLEDGE), (STATUS, ACKNOWLEDGE | FAILED)])),
    ("driven", |g, _| g.put_all(&[(STATUS, ACKNOWLEDGE), (STATUS, DRIVER)])),
    ("driven, right features", |g, _| {
        g.put_all(&[(STATUS, ACKNOWLEDGE), (STATUS, DRIVER)]);
        g.accept(VERSION_1);
    }),
    ("driven, wrong features", |g, _| g.negotiate_for(u64::MAX)),
    ("driven and given up", |g, _| {
        g.put_all(&[(STATUS, ACKNOWLEDGE), (STATUS, DRIVER)]);
        g.accept(VERSION_1);
        g.put_all(&[(STATUS, DRIVER | FAILED)]);
    }),
    ("agreed", |g, _| g.negotiate()),
    ("agreed, a queue described", |g, drivers| {
        g.negotiate();
        g.describe(1, 16, rings_of(&drivers[1]));
    }),
    ("agreed, queues ready", set_up_two),
    ("agreed and given up", |g, drivers| {
        set_up_two(g, drivers);
        g.put_all(&[(STATUS, FEATURES_OK | FAILED)]);
    }),
    ("running", |g, drivers| g.start(drivers)),
    ("running, half of the queues", |g, drivers| {
        set_up_two(g, drivers);
        g.put_all(&[(STATUS, DRIVER_OK)]);
        g.interrupt.raise().unwrap();
        g.interrupt.raise_config().unwrap();
    }),
    ("running and given up", |g, drivers| {
        g.start(drivers);
        g.put_all(&[(STATUS, DRIVER_OK | FAILED)]);
    }),
    ("reset", |g, drivers| {
        g.start(drivers);
        g.put_all(&[(STATUS, 0)]);
    }),
    ("ended", |g, drivers| {
        g.start(drivers);
        drivers[1].push(&[readable(RAM, 1)]);
        g.stops_once(1);
    }),
];

fn set_up_two(guest: &mut Guest<Console>, drivers: &mut [Driver<'_>]) {
    guest.negotiate();
    for queue in [0, 2] {
        guest.put_all(&[(QUEUE_SEL, queue)]);
        guest.set_up(queue, &drivers[usize::try_from(queue).unwrap()]);
    }
}

/// All that a write could have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Snapshot {
    mmio: MmioState,
    acked_features: u64,
}

fn snapshot(guest: &Guest<Console>) -> Snapshot {
    Snapshot { mmio: guest.mmio.save(), acked_features: guest.mmio.device().save().acked_features }
}

fn prepared(ram: &Arc<GuestRam>, prepare: Prepare) -> Guest<Console> {
    let mut guest = Guest::new(Console::new(), ram);
    let mut drivers = drivers(ram, 4, 16);
    prepare(&mut guest, &mut drivers);
    guest
}

#[test]
fn v6_every_access_in_every_state_keeps_the_rules() {
    let ram = ram();
    let pristine = snapshot(&Guest::new(Console::new(), &ram));
    let offsets: Vec<u64> =
        (0..0x120).chain(0xfe0..0x1020).chain([0x1_0000, 1 << 32, u64::MAX - 3]).collect();
    let mut changes = 0;
    for (name, prepare) in STATES {
        let mut guest = prepared(&ram, prepare);
        let before = snapshot(&guest);
        assert!(LEGAL.contains(&(before.mmio.status & !FAILED)), "{name}");
        for offset in &offsets {
            for width in WIDTHS {
                for value in VALUES {
                    let data: Vec<u8> = value.to_le_bytes().into_iter().cycle().take(width).collect();
                    let effect = guest.mmio.write(*offset, &data);
                    let after = snapshot(&guest);
                    let what = format!("{name}: {value:#x} to {offset:#x}, {width} bytes");
                    check_read(&guest, *offset, width, &what);
                    check_effect([&before, &after], (*offset, value), effect, &what);
                    if before == after {
                        continue;
                    }
                    changes += 1;
                    assert!(!guest.mmio.is_ended(), "{what}");
                    assert_eq!(width, 4, "{what}");
                    if (*offset, value) == (STATUS, 0) {
                        assert_eq!(after, pristine, "{what}");
                    } else {
                        check_change(&before, &after, *offset, &what);
                    }
                    guest = prepared(&ram, prepare);
                }
            }
        }
    }
    assert!(changes > 1000, "only {changes} writes changed anything");
}

/// Reading has no effect, which the transport reports, and only words can be read of registers.
fn check_read(guest: &Guest<Console>, offset: u64, width: usize, what: &str) {
    let mut bytes = vec![0xee; width];
    guest.mmio.read(offset, &mut bytes);
    let is_register = offset < 0x100 && offset.is_multiple_of(4) && width == 4;
    let is_config = offset >= 0x100 && offset.saturating_add(width as u64) <= 0x1000;
    if !is_register && !is_config {
        assert!(bytes.iter().all(|byte| *byte == 0), "{what}: reads {bytes:?}");
    }
    assert!(bytes != [0xee; 8] && bytes != [0xee; 4] && bytes != [0xee; 2] && bytes != [0xee], "{what}");
}

/// Work is asked for only when the device starts or stops to run, and kicks reach only queues that run.
fn check_effect(states: [&Snapshot; 2], (offset, value): (u64, u32), effect: Effect, what: &str) {
    let [before, after] = states;
    let runs = |snapshot: &Snapshot| snapshot.mmio.status == DRIVER_OK;
    match effect {
        Effect::None => assert_eq!(runs(before), runs(after), "{what}"),
        Effect::Work => assert_ne!(runs(before), runs(after), "{what}"),
        Effect::Kick(queue) => {
            assert_eq!((offset, usize::try_from(value).unwrap()), (QUEUE_NOTIFY, queue), "{what}");
            assert!(runs(before) && before.mmio.queues[queue].ready, "{what}");
        }
    }
}

/// Each register changes its own part of the state, and only while it may.
fn check_change(before: &Snapshot, after: &Snapshot, offset: u64, what: &str) {
    let mut expected = before.clone();
    let (old, new) = (&before.mmio, &after.mmio);
    match offset {
        DEVICE_FEATURES_SEL => expected.mmio.device_features_select = new.device_features_select,
        DRIVER_FEATURES_SEL => expected.mmio.driver_features_select = new.driver_features_select,
        QUEUE_SEL => expected.mmio.queue_select = new.queue_select,
        INTERRUPT_ACK => {
            assert_eq!(new.interrupt_status & !old.interrupt_status, 0, "{what}");
            expected.mmio.interrupt_status = new.interrupt_status;
        }
        DRIVER_FEATURES => {
            assert_eq!(old.status, DRIVER, "{what}");
            expected.mmio.driver_features = new.driver_features;
        }
        STATUS => {
            let place = LEGAL.iter().position(|legal| *legal == old.status);
            let next = place.and_then(|place| LEGAL.get(place + 1)).copied();
            assert!(Some(new.status) == next || new.status == old.status | FAILED, "{what}");
            if new.status == FEATURES_OK && old.status == DRIVER {
                expected.acked_features = new.driver_features;
            }
            expected.mmio.status = new.status;
        }
        QUEUE_NUM | QUEUE_READY | QUEUE_DESC | 0x84 | QUEUE_DRIVER | 0x94 | QUEUE_DEVICE | 0xa4 => {
            assert_eq!(old.status, FEATURES_OK, "{what}");
            let selected = usize::try_from(old.queue_select).unwrap();
            let (was, is) = (old.queues[selected], new.queues[selected]);
            assert!(!was.ready || offset == QUEUE_READY && !is.ready, "{what}");
            if is.ready {
                assert!(is.size.is_power_of_two() && is.size <= 256, "{what}");
                assert!(is.descriptors < RAM && is.available < RAM && is.used < RAM, "{what}");
            }
            expected.mmio.queues[selected] = is;
        }
        _ => panic!("{what}: changes {before:?} to {after:?}"),
    }
    assert_eq!(*after, expected, "{what}");
}

#[test]
fn v6_accesses_beyond_the_window_or_of_odd_widths_reach_nothing() {
    assert_eq!(Target::at(0x100, 1), Some(Target::Config(0)));
    assert_eq!(Target::at(0xff8, 8), Some(Target::Config(0xef8)));
    assert_eq!(Target::at(0xfff, 1), Some(Target::Config(0xeff)));
    for (offset, width) in [
        (0xff9, 8),
        (0xffd, 4),
        (0xfff, 2),
        (0x1000, 1),
        (0x1000, 4),
        (0x1070, 4),
        (1 << 32 | 0x100, 4),
        (u64::MAX, 1),
        (u64::MAX - 3, 8),
        (0x100, 0),
        (0x100, 3),
        (0x100, 16),
        (0xfe, 4),
        (0x6e, 4),
    ] {
        assert_eq!(Target::at(offset, width), None, "{width} bytes at {offset:#x}");
    }
}

//! ClientHellos as clients build them, and as attackers do.

mod maker;

use super::cuts::{Numbers, cuts};
use super::{ClientHello, Hello, HelloReader, HelloRefusal, MAX_HELLO, MAX_RECORDS, SecondHello};
use maker::{Maker, browser, long_vector, openssl, protocols, records, server_name};

/// The result of the reader, which must not depend on the segmentation.
fn read(bytes: &[u8]) -> Hello {
    let results = cuts(bytes).into_iter().map(|pieces| {
        let mut reader = HelloReader::new();
        pieces.into_iter().fold(Hello::More, |_, piece| reader.push(piece))
    });
    let mut results = results.collect::<Vec<_>>();
    results.dedup();
    assert_eq!(results.len(), 1, "the pieces decide: {results:?}");
    results.remove(0)
}

fn read_message(message: &[u8]) -> Hello {
    read(&records(message, 16384))
}

fn accepted(hello: &Hello) -> &ClientHello {
    let Hello::Read(hello) = hello else { panic!("not read: {hello:?}") };
    hello
}

#[test]
fn hellos_of_real_clients_are_read() {
    let hello = read_message(&openssl("Files.Example.org").message());
    let hello = accepted(&hello);
    assert_eq!(hello.name, Some("files.example.org".parse().unwrap()));
    assert_eq!(hello.protocols, ["http/1.1"]);
    assert!(!hello.encrypted_hello && !hello.early_data);

    let hello = read_message(&browser("www.example.org").message());
    let hello = accepted(&hello);
    assert_eq!(hello.name, Some("www.example.org".parse().unwrap()));
    assert_eq!(hello.protocols, ["h2", "http/1.1"]);
    assert!(hello.encrypted_hello, "a dummy cannot be distinguished from a real one");
}

#[test]
fn of_many_application_protocols_the_first_sixteen_are_kept() {
    for (count, kept) in [(15, 15), (16, 16), (17, 16), (200, 16)] {
        let hello = read_message(&Maker::new().extension(16, protocols(&vec!["h2"; count])).message());
        assert_eq!(accepted(&hello).protocols.len(), kept);
    }
}

#[test]
fn n6_a_hello_over_many_records_is_reassembled() {
    let message = browser("www.example.org").message();
    assert!(message.len() > 1500 && message.len() < MAX_RECORDS, "{}", message.len());
    for size in [1, 2, 3, 7, 100, 517, 1400] {
        let hello = read(&records(&message, size));
        assert_eq!(accepted(&hello).name, Some("www.example.org".parse().unwrap()), "records of {size}");
    }
}

#[test]
fn a_part_of_a_hello_is_never_taken_for_a_whole() {
    let bytes = records(&openssl("files.example.org").message(), 60);
    for end in 0..bytes.len() {
        assert_eq!(HelloReader::new().push(&bytes[..end]), Hello::More, "{end} bytes");
    }
    assert!(matches!(HelloReader::new().push(&bytes), Hello::Read(_)));
}

#[test]
fn what_follows_the_hello_is_not_parsed() {
    let mut bytes = records(&openssl("files.example.org").message(), 16384);
    let (alone, length) = (read(&bytes), bytes.len());
    bytes.extend(records(&openssl("evil.example").message(), 16384));
    bytes.extend([0xff; 100]);
    assert_eq!(read(&bytes), alone);
    for pieces in cuts(&bytes) {
        let mut reader = HelloReader::new();
        pieces.into_iter().for_each(|piece| drop(reader.push(piece)));
        assert_eq!(reader.length(), length);
    }
}

#[test]
fn n6_ambiguous_server_names_are_refused() {
    use HelloRefusal::{Address, BadName, Malformed, Names};
    let malformed = Malformed("the server_name extension");
    let entry = |kind: u8, name: &[u8]| [&[kind], &*long_vector(name)].concat();
    let list = |entries: &[Vec<u8>]| long_vector(&entries.concat());
    let one = |name: &[u8]| list(&[entry(0, name)]);
    let long_label = "a".repeat(64);
    let long_name = ["a".repeat(49).as_str(); 6].join(".");
    let rows: &[(&str, Vec<u8>, HelloRefusal)] = &[
        ("two names", list(&[entry(0, b"a.example"), entry(0, b"b.example")]), Names),
        ("the same name twice", list(&[entry(0, b"a.example"), entry(0, b"a.example")]), Names),
        ("a name and another kind", list(&[entry(0, b"a.example"), entry(1, b"x")]), Names),
        ("another kind before the name", list(&[entry(1, b"x"), entry(0, b"a.example")]), Names),
        ("another kind alone", list(&[entry(7, b"a.example")]), Names),
        ("no entry", list(&[]), Names),
        ("nothing at all", Vec::new(), malformed),
        ("a list longer than the extension", vec![0, 20, 0, 0, 1, b'a'], malformed),
        ("a list shorter than the extension", [list(&[entry(0, b"a.example")]), vec![0]].concat(), malformed),
        ("a name longer than the list", long_vector(&[0, 0, 9, b'a']), malformed),
        ("an empty name", one(b""), BadName),
        ("an IPv4 address", one(b"192.0.2.1"), Address),
        ("an IPv6 address", one(b"2001:db8::1"), Address),
        ("an IPv6 address in brackets", one(b"[2001:db8::1]"), Address),
        ("a mapped address", one(b"::ffff:127.0.0.1"), Address),
        ("a short IPv4 address", one(b"127.1"), BadName),
        ("an IPv4 address as one number", one(b"2130706433"), BadName),
        ("an IPv4 address in hexadecimal", one(b"0x7f.0x1"), BadName),
        ("a dot at the end", one(b"a.example."), BadName),
        ("a dot at the beginning", one(b".a.example"), BadName),
        ("two dots", one(b"a..example"), BadName),
        ("a dot alone", one(b"."), BadName),
        ("NUL behind the name", one(b"a.example\0"), BadName),
        ("NUL inside", one(b"a.example\0.evil.example"), BadName),
        ("an encoded NUL", one(b"a.example%00"), BadName),
        ("a space", one(b"a.example "), BadName),
        ("a line end", one(b"a.example\r\n"), BadName),
        ("a port", one(b"a.example:443"), BadName),
        ("a slash", one(b"a.example/x"), BadName),
        ("a star", one(b"*.example"), BadName),
        ("a user", one(b"a.example@evil.example"), BadName),
        ("letters that look alike", one("ex\u{430}mple.org".as_bytes()), BadName),
        ("a full-width dot", one("a\u{ff0e}example".as_bytes()), BadName),
        ("bytes that are no text", one(b"a\xff.example"), BadName),
        ("a long label", one(format!("{long_label}.example").as_bytes()), BadName),
        ("a long name", one(long_name.as_bytes()), BadName),
    ];
    for (what, content, refusal) in rows {
        let message = Maker::new().extension(0, content.clone()).message();
        assert_eq!(read_message(&message), Hello::Refused(*refusal), "{what}");
    }
}

#[test]
fn n6_a_hello_without_a_name_says_so() {
    assert_eq!(accepted(&read_message(&Maker::new().message())).name, None);
    assert_eq!(accepted(&read_message(&Maker::new().without_extensions().message())).name, None);
}

#[test]
fn n6_encrypted_hellos_and_early_data_are_detected() {
    for kind in [0xfe0d, 0xfe0c, 0xfe0b, 0xfe0a, 0xfe09, 0xfe08, 0xffce] {
        let message = openssl("a.example").extension(kind, vec![0; 64]).message();
        assert!(accepted(&read_message(&message)).encrypted_hello, "{kind:#x}");
    }
    let message = openssl("a.example").extension(42, Vec::new()).message();
    assert!(accepted(&read_message(&message)).early_data);
}

#[test]
fn n6_malformed_and_old_hellos_are_refused() {
    use HelloRefusal::{Malformed, OldTls, Twice};
    const LISTS: HelloRefusal = Malformed("empty or odd lists of ciphers or compression methods");
    let named = || openssl("a.example");
    let rows: Vec<(&str, Maker, HelloRefusal)> = vec![
        ("SSL 3", Maker { version: 0x0300, ..named() }, OldTls),
        ("TLS 1.0", Maker { version: 0x0301, ..named() }, OldTls),
        ("TLS 1.1", Maker { version: 0x0302, ..named() }, OldTls),
        ("only old versions listed", Maker::new().extension(43, vec![4, 3, 2, 3, 1]), OldTls),
        ("only GREASE versions listed", Maker::new().extension(43, vec![2, 0xfa, 0xfa]), OldTls),
        ("no versions listed", Maker::new().extension(43, vec![0]), OldTls),
        (
            "half a version",
            Maker::new().extension(43, vec![3, 3, 4, 3]),
            Malformed("the supported_versions extension"),
        ),
        ("the name twice", named().extension(0, server_name("b.example")), Twice(0)),
        ("the same name twice", named().extension(0, server_name("a.example")), Twice(0)),
        ("a GREASE value twice", named().extension(0x1a1a, vec![]).extension(0x1a1a, vec![]), Twice(0x1a1a)),
        (
            "a long session",
            Maker { session: vec![1; 33], ..named() },
            Malformed("the session id is too long"),
        ),
        ("no ciphers", Maker { suites: Vec::new(), ..named() }, LISTS),
        ("no compression", Maker { compressions: Vec::new(), ..named() }, LISTS),
        ("half a cipher", Maker { odd_suites: true, ..named() }, LISTS),
        ("bytes behind", Maker { behind: vec![0], ..named() }, Malformed("bytes behind the extensions")),
        ("half an extension", Maker { half_extension: true, ..named() }, Malformed("half an extension")),
        (
            "an empty protocol",
            Maker::new().extension(16, vec![0, 1, 0]),
            Malformed("the list of application protocols"),
        ),
    ];
    for (what, maker, refusal) in rows {
        assert_eq!(read_message(&maker.message()), Hello::Refused(refusal), "{what}");
    }
    let many = (0..200).fold(Maker::new(), |maker, kind| maker.extension(0x2000 + kind, Vec::new()));
    assert_eq!(read_message(&many.message()), Hello::Refused(Malformed("too many extensions")));
}

#[test]
fn n6_records_that_do_not_belong_there_are_refused() {
    let message = openssl("a.example").message();
    let (first, second) = message.split_at(40);
    let cut_by = |between: &[u8]| [&records(first, 40), between, &records(second, 16384)].concat();
    let rows: &[(&str, Vec<u8>)] = &[
        ("an alert", cut_by(&[21, 3, 3, 0, 2, 1, 0])),
        ("a change of cipher", cut_by(&[20, 3, 3, 0, 1, 1])),
        ("data", cut_by(&[23, 3, 3, 0, 1, 0])),
        ("an empty record", cut_by(&[22, 3, 3, 0, 0])),
        ("a record of another protocol", cut_by(&[22, 2, 0, 0, 1, 0])),
        ("a record that is too long", cut_by(&[22, 3, 3, 0x40, 1])),
        ("an empty first record", [&[22, 3, 1, 0, 0], &*records(&message, 16384)].concat()),
    ];
    for (what, bytes) in rows {
        assert_eq!(read(bytes), Hello::Refused(HelloRefusal::Record), "{what}");
    }
    let mut with_more = message.clone();
    with_more.push(16);
    assert_eq!(read_message(&with_more), Hello::Refused(HelloRefusal::Trailing));
    let two = [message, openssl("b.example").message()].concat();
    assert_eq!(read_message(&two), Hello::Refused(HelloRefusal::Trailing));
    assert_eq!(read_message(&[2, 0, 0, 0]), Hello::Refused(HelloRefusal::NotHello(2)));
}

#[test]
fn other_protocols_are_distinguished_from_tls() {
    let rows: &[(&[u8], Hello)] = &[
        (b"GET / HTTP/1.1\r\n", Hello::NotTls),
        (b"SSH-2.0-OpenSSH\r\n", Hello::NotTls),
        (b"\x16\xfe\xfd\0\0\0\0\0\0\0\0\0\x10", Hello::NotTls),
        (b"\0\x1d\0\x01", Hello::NotTls),
        (b"\x80\x05hello", Hello::NotTls),
        (b"\x80\x2e\x01\0\x02\0\x15", Hello::Refused(HelloRefusal::Ssl2)),
        (b"\x80\x2e\x01\x03\x01\0\x15", Hello::Refused(HelloRefusal::Ssl2)),
        (b"", Hello::More),
        (b"\x16", Hello::More),
        (b"\x80\x2e\x01", Hello::More),
        // As early as possible: behind a server that speaks first nothing more comes.
        (b"G", Hello::NotTls),
        (b"\x16\x07", Hello::NotTls),
        (b"\x7f\x2e", Hello::NotTls),
    ];
    for (bytes, result) in rows {
        assert_eq!(read(bytes), *result, "{}", bytes.escape_ascii());
    }
}

#[test]
fn r5_hellos_have_limits() {
    let long = openssl("a.example").extension(0x2000, vec![0; 60_000]).message();
    assert!(matches!(HelloReader::new().push(&records(&long, 16384)), Hello::Read(_)));
    // The announced length alone is enough to refuse it.
    let announced = u32::try_from(MAX_HELLO - 3).unwrap().to_be_bytes();
    let start = [22, 3, 1, 0x40, 0, 1, announced[1], announced[2], announced[3]];
    assert_eq!(read(&start), Hello::Refused(HelloRefusal::TooLong));
    let longest = u32::try_from(MAX_HELLO - 4).unwrap().to_be_bytes();
    assert_eq!(read(&[22, 3, 1, 0x40, 0, 1, longest[1], longest[2], longest[3]]), Hello::More);
    let spread = openssl("a.example").extension(0x2000, vec![0; MAX_RECORDS]).message();
    let mut reader = HelloReader::new();
    assert_eq!(reader.push(&records(&spread, 1)), Hello::Refused(HelloRefusal::TooLong));
}

#[test]
fn damaged_hellos_never_depend_on_their_pieces() {
    let bytes = records(&browser("a.example").message(), 700);
    let mut numbers = Numbers::new(7);
    for _ in 0..100 {
        let mut damaged = bytes.clone();
        for _ in 0..=numbers.below(3) {
            // Most lengths are near the beginning.
            let end = if numbers.below(2) == 0 { 140 } else { bytes.len() };
            let any = u8::try_from(numbers.below(256)).unwrap();
            damaged[numbers.below(end)] = [0, 1, 0x7f, 0xff, any][numbers.below(5)];
        }
        read(&damaged);
    }
}

/// The result behind a first ClientHello, which must not depend on the segmentation either.
fn watch(first: &ClientHello, bytes: &[u8]) -> Result<bool, HelloRefusal> {
    let results = cuts(bytes).into_iter().map(|pieces| {
        let mut watch = SecondHello::new(first);
        let answers = pieces.into_iter().map(|piece| watch.push(piece));
        answers.last().unwrap_or(Ok(true))
    });
    let mut results = results.collect::<Vec<_>>();
    results.dedup();
    assert_eq!(results.len(), 1, "the pieces decide: {results:?}");
    results.remove(0)
}

#[test]
fn n6_a_second_hello_keeps_the_name_of_the_first() {
    let first = ClientHello { name: Some("a.example".parse().unwrap()), ..ClientHello::default() };
    let early = ClientHello { early_data: true, ..first.clone() };
    let hello = |name: &str, size| records(&openssl(name).message(), size);
    let change: &[u8] = &[20, 3, 3, 0, 1, 1];
    let data: &[u8] = &[23, 3, 3, 0, 2, 0, 0];
    // The last handshake record of a resumed TLS 1.2 session: encrypted, and by chance it begins like a
    // ClientHello.
    let unlucky: &[u8] = &[22, 3, 3, 0, 8, 1, 0, 40, 1, 3, 3, 0, 0];
    let hidden = records(&openssl("a.example").extension(0xfe0d, vec![0; 8]).message(), 900);
    let nameless = records(&Maker::new().message(), 900);
    let message = openssl("evil.example").message();
    let (start, rest) = (records(&message[..3], 3), records(&message[3..], 900));
    let empty: &[u8] = &[22, 3, 3, 0, 0];
    let (changed, not_there) = (Err(HelloRefusal::Changed), Err(HelloRefusal::Record));
    type Row<'a> = (&'a str, &'a ClientHello, Vec<u8>, Result<bool, HelloRefusal>);
    let rows: &[Row<'_>] = &[
        ("the same name", &first, hello("a.example", 900), Ok(false)),
        ("the same name in capitals", &first, hello("A.EXAMPLE", 900), Ok(false)),
        ("another name", &first, hello("evil.example", 900), changed),
        ("another name in many records", &first, hello("evil.example", 1), changed),
        ("no name", &first, nameless, changed),
        ("a name that is hidden now", &first, hidden, changed),
        (
            "another name behind a change of cipher",
            &first,
            [change, &hello("evil.example", 1)].concat(),
            changed,
        ),
        (
            "another name behind early data",
            &early,
            [data, data, &hello("evil.example", 900)].concat(),
            changed,
        ),
        ("another name, cut by early data", &early, [change, &start, data, &rest].concat(), not_there),
        ("the rest of a handshake of TLS 1.2", &first, vec![22, 3, 3, 0, 3, 16, 0, 0], Ok(false)),
        (
            "an older session of TLS 1.2",
            &first,
            [change, &[22, 3, 3, 0, 2, 0x51, 7], data].concat(),
            Ok(false),
        ),
        ("an unlucky one", &first, [change, unlucky, data].concat(), Ok(false)),
        ("another name, cut by an empty record", &first, [change, &start, empty, &rest].concat(), not_there),
        (
            "another name, cut by a change of cipher",
            &first,
            [change, &start, change, &rest].concat(),
            not_there,
        ),
        ("TLS 1.3 as usual", &first, [change, data].concat(), Ok(false)),
        ("early data without end", &early, data.repeat(50), Ok(true)),
        ("only a change of cipher", &first, change.to_vec(), Ok(true)),
        ("an alert", &first, vec![21, 3, 3, 0, 2, 1, 0], Ok(true)),
        ("something else", &first, b"GET / HTTP/1.1\r\n".to_vec(), not_there),
    ];
    for (what, first, bytes, result) in rows {
        assert_eq!(watch(first, bytes), *result, "{what}");
    }
}

#[test]
fn n6_a_second_hello_has_limits_too() {
    let first = ClientHello { name: Some("a.example".parse().unwrap()), ..ClientHello::default() };
    // After ChangeCipherSpec an announced length proves nothing, but the bytes do.
    let endless =
        [&[20, 3, 3, 0, 1, 1], &*records(&[&[1, 2, 0, 0], &*vec![3; MAX_HELLO]].concat(), 16384)].concat();
    let mut watch = SecondHello::new(&first);
    assert_eq!(watch.push(&endless), Err(HelloRefusal::TooLong));
    assert_eq!(watch.push(&[0]), Err(HelloRefusal::TooLong));
}

#[test]
fn r5_what_may_be_encrypted_is_buffered_up_to_the_limit() {
    let record = |content: &[u8]| [&[22, 3, 3, 0x40, 0][..], content].concat();
    let rest = [3; 16384];
    let mut first = rest;
    first[..4].copy_from_slice(&[1, 0xff, 0xff, 0xff]);
    let mut watch = SecondHello::new(&ClientHello::default());
    assert_eq!(watch.push(&[20, 3, 3, 0, 1, 1]), Ok(true));
    for content in [&first, &rest, &rest, &rest] {
        assert_eq!(watch.push(&record(content)), Ok(true));
    }
    assert_eq!(watch.push(&record(&rest)), Err(HelloRefusal::TooLong));
}

#[test]
fn n6_records_between_the_hellos_have_a_type_a_version_and_a_length() {
    let first = ClientHello::default();
    let rows: [(&[u8], Result<bool, HelloRefusal>); 8] = [
        (&[99], Err(HelloRefusal::Record)),
        (&[24], Err(HelloRefusal::Record)),
        (&[21, 3, 3, 0, 2], Ok(true)),
        (&[21, 2, 3, 0, 2], Err(HelloRefusal::Record)),
        (&[21, 3, 3, 0x40, 0], Ok(true)),
        (&[21, 3, 3, 0x48, 0], Ok(true)),
        (&[21, 3, 3, 0x48, 1], Err(HelloRefusal::Record)),
        (&[23], Ok(false)),
    ];
    for (bytes, expected) in rows {
        assert_eq!(watch(&first, bytes), expected, "{bytes:?}");
    }
}

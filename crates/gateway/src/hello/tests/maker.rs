//! Builds ClientHellos field by field, well formed or not.

#[derive(Clone)]
pub(super) struct Maker {
    pub(super) version: u16,
    pub(super) session: Vec<u8>,
    pub(super) suites: Vec<u16>,
    /// Appends one byte to the cipher suites.
    pub(super) odd_suites: bool,
    pub(super) compressions: Vec<u8>,
    pub(super) extensions: Option<Vec<(u16, Vec<u8>)>>,
    /// Appends one byte inside the extensions.
    pub(super) half_extension: bool,
    /// Bytes behind the extensions.
    pub(super) behind: Vec<u8>,
}

impl Maker {
    /// A TLS 1.2 ClientHello with an empty list of extensions.
    pub(super) fn new() -> Self {
        Self {
            version: 0x0303,
            session: Vec::new(),
            suites: vec![0xc02f, 0xc030],
            odd_suites: false,
            compressions: vec![0],
            extensions: Some(Vec::new()),
            half_extension: false,
            behind: Vec::new(),
        }
    }

    pub(super) fn extension(mut self, kind: u16, content: Vec<u8>) -> Self {
        self.extensions.get_or_insert_default().push((kind, content));
        self
    }

    pub(super) fn without_extensions(self) -> Self {
        Self { extensions: None, ..self }
    }

    pub(super) fn message(&self) -> Vec<u8> {
        let mut body = self.version.to_be_bytes().to_vec();
        body.extend((0..32).map(|number| number * 7));
        body.extend(short_vector(&self.session));
        let mut suites = numbers(&self.suites);
        suites.extend(self.odd_suites.then_some(0));
        body.extend(long_vector(&suites));
        body.extend(short_vector(&self.compressions));
        if let Some(extensions) = &self.extensions {
            let each = extensions
                .iter()
                .map(|(kind, content)| [&kind.to_be_bytes(), &*long_vector(content)].concat());
            let mut list = each.collect::<Vec<_>>().concat();
            list.extend(self.half_extension.then_some(0));
            body.extend(long_vector(&list));
        }
        body.extend(&self.behind);
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        [&[1], &length[1..], &body].concat()
    }
}

/// What OpenSSL 3 sends by default.
pub(super) fn openssl(name: &str) -> Maker {
    let suites =
        vec![0x1302, 0x1303, 0x1301, 0xc02c, 0xc030, 0x009f, 0xcca9, 0xcca8, 0xc02b, 0xc02f, 0x009e, 0x00ff];
    Maker { session: vec![0x5e; 32], suites, ..Maker::new() }
        .extension(0, server_name(name))
        .extension(11, vec![3, 0, 1, 2])
        .extension(10, long_vector(&numbers(&[29, 23, 30, 25, 24])))
        .extension(35, Vec::new())
        .extension(16, protocols(&["http/1.1"]))
        .extension(22, Vec::new())
        .extension(23, Vec::new())
        .extension(13, long_vector(&numbers(&[0x0403, 0x0503, 0x0603, 0x0807, 0x0804, 0x0401])))
        .extension(43, short_vector(&numbers(&[0x0304, 0x0303])))
        .extension(45, vec![1, 1])
        .extension(51, long_vector(&key_share(29, 32)))
}

/// What a browser sends: GREASE in every list, post-quantum keys, a dummy encrypted ClientHello, padding.
pub(super) fn browser(name: &str) -> Maker {
    const MIXED: u16 = 0x11ec;
    let suites = vec![0x3a3a, 0x1301, 0x1302, 0x1303, 0xc02b, 0xc02f, 0xc02c, 0xc030, 0xcca9, 0xcca8, 0x009c];
    let shares = [key_share(0x8a8a, 1), key_share(MIXED, 1216), key_share(29, 32)].concat();
    // The outer type, its ciphers, a config id, a key, and a payload.
    let dummy = [&[0, 0, 1, 0, 1, 0x7b], &*long_vector(&[0x42; 32]), &*long_vector(&[0x99; 176])].concat();
    Maker { session: vec![0x77; 32], suites, ..Maker::new() }
        .extension(0x4a4a, Vec::new())
        .extension(51, long_vector(&shares))
        .extension(0xfe0d, dummy)
        .extension(5, vec![1, 0, 0, 0, 0])
        .extension(43, short_vector(&numbers(&[0xdada, 0x0304, 0x0303])))
        .extension(16, protocols(&["h2", "http/1.1"]))
        .extension(17613, vec![0, 3, 2, b'h', b'2'])
        .extension(0, server_name(name))
        .extension(27, vec![2, 0, 2])
        .extension(45, vec![1, 1])
        .extension(10, long_vector(&numbers(&[0x8a8a, MIXED, 29, 23, 24])))
        .extension(13, long_vector(&numbers(&[0x0403, 0x0804, 0x0401, 0x0503, 0x0805, 0x0501])))
        .extension(65281, vec![0])
        .extension(18, Vec::new())
        .extension(23, Vec::new())
        .extension(35, Vec::new())
        .extension(11, vec![1, 0])
        .extension(0xbaba, vec![0])
        .extension(21, vec![0; 40])
}

pub(super) fn server_name(name: &str) -> Vec<u8> {
    long_vector(&[&[0], &*long_vector(name.as_bytes())].concat())
}

pub(super) fn protocols(names: &[&str]) -> Vec<u8> {
    long_vector(&names.iter().map(|name| short_vector(name.as_bytes())).collect::<Vec<_>>().concat())
}

fn key_share(group: u16, length: usize) -> Vec<u8> {
    [&group.to_be_bytes(), &*long_vector(&vec![0xab; length])].concat()
}

fn numbers(all: &[u16]) -> Vec<u8> {
    all.iter().flat_map(|number| number.to_be_bytes()).collect()
}

fn short_vector(content: &[u8]) -> Vec<u8> {
    [&[u8::try_from(content.len()).unwrap()], content].concat()
}

pub(super) fn long_vector(content: &[u8]) -> Vec<u8> {
    [&u16::try_from(content.len()).unwrap().to_be_bytes(), content].concat()
}

/// The message in records of at most `size` bytes.
pub(super) fn records(message: &[u8], size: usize) -> Vec<u8> {
    let each = message.chunks(size).map(|piece| [&[22, 3, 1], &*long_vector(piece)].concat());
    each.collect::<Vec<_>>().concat()
}

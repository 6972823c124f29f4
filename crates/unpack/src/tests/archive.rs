//! Archives, made byte by byte.

/// A header, with the fields that tests choose.
#[derive(Clone)]
pub(crate) struct Header {
    pub(crate) name: Vec<u8>,
    pub(crate) kind: u8,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: u64,
    pub(crate) size: u64,
    pub(crate) link: Vec<u8>,
    pub(crate) device: (u32, u32),
    pub(crate) magic: &'static [u8; 8],
}

impl Default for Header {
    fn default() -> Self {
        Self {
            name: Vec::new(),
            kind: b'0',
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime: 0,
            size: 0,
            link: Vec::new(),
            device: (0, 0),
            magic: b"ustar\x0000",
        }
    }
}

impl Header {
    pub(crate) fn new(name: impl AsRef<[u8]>, kind: u8) -> Self {
        Self { name: name.as_ref().to_vec(), kind, ..Self::default() }
    }

    /// The block, with a valid checksum.
    pub(crate) fn block(&self) -> [u8; 512] {
        let mut block = [0; 512];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.name[..self.name.len().min(100)]);
        put(100, format!("{:07o}\0", self.mode).as_bytes());
        put(108, format!("{:07o}\0", self.uid).as_bytes());
        put(116, format!("{:07o}\0", self.gid).as_bytes());
        put(124, format!("{:011o}\0", self.size).as_bytes());
        put(136, format!("{:011o}\0", self.mtime).as_bytes());
        put(156, &[self.kind]);
        put(157, &self.link[..self.link.len().min(100)]);
        put(257, self.magic);
        put(329, format!("{:07o}\0", self.device.0).as_bytes());
        put(337, format!("{:07o}\0", self.device.1).as_bytes());
        seal(&mut block);
        block
    }
}

/// Sets the checksum of a header.
pub(crate) fn seal(block: &mut [u8; 512]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().copied().map(u32::from).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

#[derive(Clone, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
}

impl Archive {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// The archive with its end.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        [self.bytes.as_slice(), &[0; 1024]].concat()
    }

    pub(crate) fn without_end(&self) -> Vec<u8> {
        self.bytes.clone()
    }

    /// Adds bytes as they are.
    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend(bytes);
        self
    }

    /// Adds data up to the end of its last block.
    pub(crate) fn data(mut self, data: &[u8]) -> Self {
        self.bytes.extend(data);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self
    }

    /// Adds a header. A name or a target that it has no space for becomes an entry of GNU's before it.
    pub(crate) fn header(self, header: &Header) -> Self {
        let long = |archive: Self, kind, text: &[u8]| {
            if text.len() <= 100 { archive } else { archive.meta(kind, &[text, b"\0"].concat()) }
        };
        let archive = long(self, b'L', &header.name);
        let archive = long(archive, b'K', &header.link);
        archive.raw(&header.block())
    }

    /// Adds a header that describes the next one, and its data.
    pub(crate) fn meta(self, kind: u8, data: &[u8]) -> Self {
        let header = Header { size: data.len() as u64, ..Header::new("meta", kind) };
        self.raw(&header.block()).data(data)
    }

    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let records: Vec<u8> =
            records.iter().flat_map(|(key, value)| pax_record(key.as_bytes(), value)).collect();
        self.meta(b'x', &records)
    }

    pub(crate) fn file(self, name: impl AsRef<[u8]>, data: impl AsRef<[u8]>) -> Self {
        let data = data.as_ref();
        self.header(&Header { size: data.len() as u64, ..Header::new(name, b'0') }).data(data)
    }

    pub(crate) fn directory(self, name: impl AsRef<[u8]>) -> Self {
        self.header(&Header { mode: 0o755, ..Header::new(name, b'5') })
    }

    pub(crate) fn symlink(self, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        self.header(&Header { link: target.as_ref().to_vec(), mode: 0o777, ..Header::new(name, b'2') })
    }

    pub(crate) fn link(self, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        self.header(&Header { link: target.as_ref().to_vec(), ..Header::new(name, b'1') })
    }
}

/// A record of a PAX header.
pub(crate) fn pax_record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    [length.to_string().as_bytes(), b" ", key, b"=", value, b"\n"].concat()
}

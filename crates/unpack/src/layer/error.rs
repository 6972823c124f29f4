//! Why a layer was not unpacked.

use std::io;

/// Why a layer was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("Cannot decompress the layer")]
    Read(#[source] io::Error),
    #[error("Cannot write the unpacked layer")]
    Write(#[source] io::Error),
    /// `entry` is escaped and shortened.
    #[error("The layer's entry \"{entry}\" is refused: {refusal}")]
    Entry { entry: String, refusal: Refusal },
    #[error("The layer is refused: {0}")]
    Layer(Refusal),
}

impl LayerError {
    /// The error for what happened at `entry`, which is empty outside of the entries.
    pub(crate) fn new(entry: String, refusal: Refusal) -> Self {
        match refusal {
            Refusal::Read(error) => Self::Read(error),
            Refusal::Write(error) => Self::Write(error),
            refusal if entry.is_empty() => Self::Layer(refusal),
            refusal => Self::Entry { entry, refusal },
        }
    }

    /// What was refused, if it is not that reading or writing failed.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Entry { refusal, .. } | Self::Layer(refusal) => Some(refusal),
            Self::Read(_) | Self::Write(_) => None,
        }
    }
}

/// What an archive did that is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("cannot decompress the layer")]
    Read(#[source] io::Error),
    #[error("cannot write the unpacked layer")]
    Write(#[source] io::Error),

    #[error("the archive has more than {0} bytes")]
    TooLarge(u64),
    #[error("the archive expands to more than {0} times its compressed size")]
    Ratio(u64),
    #[error("the archive has more than {0} entries")]
    TooManyEntries(u64),
    #[error("the archive's tree takes more than {0} bytes of memory")]
    TreeTooLarge(u64),
    #[error("the archive is truncated")]
    Truncated,
    #[error("a header's checksum is wrong")]
    Checksum,
    #[error("data follows a single block of zeros")]
    LoneZeroBlock,
    #[error("its {0} is not a valid number")]
    Number(&'static str),
    #[error("its {0} is out of range")]
    Range(&'static str),
    #[error("its type {0:#04x} is unknown")]
    UnknownType(u8),

    #[error("its PAX header is malformed")]
    Pax,
    #[error("its PAX header has more than {0} bytes")]
    PaxTooLong(usize),
    #[error("its extended attributes have more than {0} bytes")]
    XattrsTooLong(usize),
    #[error("an extended attribute's name is invalid")]
    XattrName,
    #[error("its sparse map is malformed")]
    SparseMap,
    #[error("its sparse map has more than {0} segments")]
    TooManySegments(usize),
    #[error("its sparse map is too fine for its size")]
    SparseTooFine,
    #[error("its sparse map is not aligned to blocks of {0} bytes")]
    SparseUnaligned(u64),

    #[error("it has no name")]
    EmptyName,
    #[error("its name has more than {0} bytes")]
    PathTooLong(usize),
    #[error("a component of its name has more than {0} bytes")]
    ComponentTooLong(usize),
    #[error("its name has more than {0} components")]
    TooDeep(usize),
    #[error("its name has \"..\" in it")]
    ParentInName,
    #[error("its name has a NUL byte in it")]
    NulInName,
    #[error("its name is that of the root, which is a directory")]
    Root,
    #[error("it is below \"{0}\", which this layer makes something else than a directory")]
    BelowNonDirectory(String),
    #[error("it is below a whiteout")]
    BelowWhiteout,
    #[error("it is a whiteout without a valid name")]
    WhiteoutName,

    #[error("the target of a symbolic link is empty, has a NUL byte in it, or more than {0} bytes")]
    SymlinkTarget(usize),
    #[error("the target of a hard link is invalid: {0}")]
    LinkTarget(#[source] Box<Self>),
    #[error("it is a hard link to itself")]
    LinkToItself,
    #[error("it is a hard link to a directory, \"{0}\"")]
    LinkToDirectory(String),
    #[error("it is a hard link to \"{0}\", which does not exist")]
    LinkToMissing(String),
}

//! Links the attacker's program where a guest kernel is: it stands for one, and the filter looks at addresses.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The first page there stays free, for what it tries out.
    println!("cargo::rustc-link-arg-bin=jail-probe=-Wl,-Ttext=0x60001000");
}

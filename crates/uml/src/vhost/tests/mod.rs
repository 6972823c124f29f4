//! The server against a client that plays the guest's driver: message by message as Linux sends them, and then as an
//! attacker would.

mod frontend;
mod hostile;
mod ordinary;

package org.lapilli;

import java.lang.ref.PhantomReference;
import java.lang.ref.ReferenceQueue;
import java.util.Collections;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

/**
 * An address in C++ that is freed once: by close(), or after its owner was collected; but never while a call uses it. (Android has
 * java.lang.ref.Cleaner since API 33 only, so this is one.)
 */
final class Handle {
  interface Free {
    void free(long address);
  }

  private static final class Owner extends PhantomReference<Object> {
    final Handle handle;

    Owner(Object owner, Handle handle) {
      super(owner, COLLECTED);
      this.handle = handle;
    }
  }

  private static final ReferenceQueue<Object> COLLECTED = new ReferenceQueue<>();
  private static final Set<Owner> OWNERS = Collections.newSetFromMap(new ConcurrentHashMap<>());

  static {
    Thread reaper = new Thread(Handle::reap, "lapilli-cleaner");
    reaper.setDaemon(true);
    reaper.start();
  }

  private final long address;
  private final String what;
  private final Free free;
  private Owner owner;
  private int uses;
  private boolean closed;

  private Handle(long address, String what, Free free) {
    this.address = address;
    this.what = what;
    this.free = free;
  }

  /** A handle that is closed at the latest when `owner` is collected; `free` does not refer to it. */
  static Handle of(Object owner, long address, String what, Free free) {
    Handle handle = new Handle(address, what, free);
    handle.owner = new Owner(owner, handle);
    OWNERS.add(handle.owner);
    return handle;
  }

  /** The address, which stays until exit(). */
  synchronized long enter() {
    if (closed) throw new IllegalStateException("This " + what + " was closed. Load or make another one.");
    ++uses;
    return address;
  }

  synchronized void exit() {
    if (--uses == 0 && closed) release();
  }

  /** Frees the address now, or when the calls that use it have returned. Closing again does nothing. */
  synchronized void close() {
    if (closed) return;
    closed = true;
    if (uses == 0) release();
  }

  private void release() {
    OWNERS.remove(owner);
    free.free(address);
  }

  private static void reap() {
    while (true) {
      try {
        ((Owner) COLLECTED.remove()).handle.close();
      } catch (InterruptedException | RuntimeException ignored) {
        // nobody interrupts this thread, and others must still be freed
      }
    }
  }
}

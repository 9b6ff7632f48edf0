// What the loader of fault_loader.cpp is told and asked; it is found with find_symbol.
#pragma once

extern "C" {
struct FaultControl {
  // The n-th call from now on (from 1) that may return such a result does, and the `count - 1` after it. 0: none.
  void (*arm)(long n, int kind, long count);
  const char* (*fired)();     // the function that failed first since then, or null
  const char* (*left)();      // kinds of objects that exist, but for the instance's; "" when there are none
  const char* (*violation)(); // what was destroyed while the device worked on it, or null
};
}

// The last: in calls of the thread that arms alone, for others may use another device meanwhile.
enum FaultKind { fault_out_of_memory = 0, fault_device_lost = 1, fault_device_lost_here = 2 };

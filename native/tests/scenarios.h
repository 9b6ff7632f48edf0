// Four ways of using the player, each with a check of every result, for tests in which any call may fail.
#pragma once

#include "lapilli.h"

#include <string>

// What a scenario found. A call that fails says nothing wrong by itself; a wrong number, or a status that the failure does
// not explain, does.
struct Outcome {
  std::string wrong;         // the first; empty: nothing
  std::string first_failure; // of a call, with its message
  int failures = 0;
};

struct Scenario {
  const char* name;
  void (*run)(Outcome& outcome);
};

extern const Scenario scenarios[4];

// Set while a call of the player runs, for what makes only those fail.
inline bool inside_the_player = false;

// Loads a small program and runs it: nothing may fail.
void run_without_failure(Outcome& outcome);

// Which statuses a call may return besides LAPILLI_OK, as bits.
inline unsigned allowed_statuses = 0;
constexpr unsigned bit(lapilli_status status) { return 1u << status; }

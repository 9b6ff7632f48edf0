// libstdc++'s last words name the type of an exception that nobody caught, and bring a demangler along: a ninth of the smallest player.
// For a shared library alone, which hides it: an application keeps its own.
#include <cstdlib>

namespace __gnu_cxx {
void __verbose_terminate_handler();
void __verbose_terminate_handler() { std::abort(); }
} // namespace __gnu_cxx

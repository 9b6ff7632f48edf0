// Blocks and the edges between them: control flow is structured as Vulkan demands, and a value is defined wherever it is used.
// Drivers take both for granted.

#include "format/spirv_module.h"

#include <algorithm>

namespace lapilli::spirv {

namespace {

constexpr uint32_t none = UINT32_MAX;
constexpr uint32_t deepest = 256;

// A selection or a loop.
struct Construct {
  uint32_t header, merge, proceed; // blocks; `proceed` is a loop's continue target, or none
  bool is_switch;
  uint32_t outer = none; // construct around it
  uint32_t depth = 0;
};

struct Block {
  uint32_t first = 0, last = 0; // instructions: after the label, and the terminator
  uint32_t construct = none;    // that it heads
  std::vector<uint32_t> next;
};

class Flow {
public:
  Flow(const Module& module, const Function& function) : m_(module), f_(function) {}

  void run() {
    blocks();
    order();
    dominators();
    constructs();
    edges();
    values();
  }

private:
  void need(bool holds, const char* why) const { m_.check(holds, "has a function whose ", why); }

  uint32_t block_of(uint32_t label) const {
    const Id& id = m_.ids[label];
    need(id.role == Role::label && id.instruction > f_.first && id.instruction < f_.last, "branches leave it");
    return id.block;
  }

  void blocks() {
    blocks_.resize(f_.blocks.size());
    for (uint32_t b = 0; b < blocks_.size(); ++b) {
      Block& block = blocks_[b];
      block.first = f_.blocks[b] + 1;
      block.last = (b + 1 < blocks_.size() ? f_.blocks[b + 1] : f_.last) - 1;
      uint32_t merge = none;
      bool others = false; // than phis
      for (uint32_t n = block.first; n <= block.last; ++n) {
        const Instruction& i = m_.instructions[n];
        need(merge == none || n == block.last, "merges are not before branches");
        if (i.op == op_loop_merge || i.op == op_selection_merge)
          merge = n;
        need(i.op != op_phi || !others, "phis are not first in their blocks");
        others = others || i.op != op_phi;
      }
      const Instruction& end = m_.instructions[block.last];
      const std::span<const uint32_t> given = m_.operands(end);
      if (end.op == op_branch)
        add(block, given[0]);
      else if (end.op == op_branch_conditional)
        for (const uint32_t label : given.subspan(1, 2))
          add(block, label);
      else if (end.op == op_switch) {
        add(block, given[1]);
        for (size_t n = 3; n < given.size(); n += 2)
          add(block, given[n]);
      }
      if (merge != none)
        header(b, m_.instructions[merge], end.op);
      else
        need(end.op != op_switch, "switches have no merge");
    }
    for (const Block& block : blocks_)
      for (const uint32_t next : block.next)
        need(next != 0, "first block is branched to");
  }

  void add(Block& block, uint32_t label) { block.next.push_back(block_of(label)); }

  void header(uint32_t b, const Instruction& merge, uint32_t end) {
    const std::span<const uint32_t> given = m_.operands(merge);
    const bool loop = merge.op == op_loop_merge;
    need(loop ? end == op_branch || end == op_branch_conditional : end == op_branch_conditional || end == op_switch,
         "merges are not before branches");
    need(!loop || given[2] < 16, "loops have unknown controls");
    blocks_[b].construct = static_cast<uint32_t>(constructs_.size());
    constructs_.push_back({b, block_of(given[0]), loop ? block_of(given[1]) : none, end == op_switch});
  }

  // Blocks from which there is a way from the first, in reverse postorder.
  void order() {
    number_.assign(blocks_.size(), none);
    std::vector<std::pair<uint32_t, size_t>> open{{0, 0}};
    std::vector<bool> seen(blocks_.size());
    seen[0] = true;
    while (!open.empty()) {
      auto& [block, at] = open.back();
      if (at < blocks_[block].next.size()) {
        const uint32_t next = blocks_[block].next[at++];
        if (!seen[next]) {
          seen[next] = true;
          open.emplace_back(next, 0);
        }
      } else {
        order_.push_back(block);
        open.pop_back();
      }
    }
    std::ranges::reverse(order_);
    for (uint32_t n = 0; n < order_.size(); ++n)
      number_[order_[n]] = n;
  }

  bool reached(uint32_t block) const { return number_[block] != none; }

  // "A Simple, Fast Dominance Algorithm", Cooper, Harvey and Kennedy. In a structured function two rounds are enough.
  void dominators() {
    before_.resize(blocks_.size());
    for (const uint32_t b : order_)
      for (const uint32_t next : blocks_[b].next)
        before_[next].push_back(b);
    dominator_.assign(order_.size(), none);
    dominator_[0] = 0;
    bool changed = true;
    for (int round = 0; changed; ++round) {
      need(round < 8, "control flow is not structured");
      changed = false;
      for (uint32_t n = 1; n < order_.size(); ++n) {
        uint32_t found = none;
        for (const uint32_t b : before_[order_[n]]) {
          uint32_t other = number_[b];
          if (dominator_[other] == none)
            continue;
          if (found == none) {
            found = other;
            continue;
          }
          while (found != other)
            if (found > other)
              found = dominator_[found];
            else
              other = dominator_[other];
        }
        changed = changed || dominator_[n] != found;
        dominator_[n] = found;
      }
    }
    // Numbers by which dominance is looked up: of each block when a walk down the tree enters and leaves it.
    std::vector<std::vector<uint32_t>> children(order_.size());
    for (uint32_t n = 1; n < order_.size(); ++n)
      children[dominator_[n]].push_back(n);
    enter_.resize(order_.size());
    leave_.resize(order_.size());
    uint32_t clock = 0;
    std::vector<std::pair<uint32_t, size_t>> open{{0, 0}};
    enter_[0] = clock++;
    while (!open.empty()) {
      auto& [n, at] = open.back();
      if (at < children[n].size()) {
        const uint32_t child = children[n][at++];
        enter_[child] = clock++;
        open.emplace_back(child, 0);
      } else {
        leave_[n] = clock++;
        open.pop_back();
      }
    }
  }

  bool dominates(uint32_t a, uint32_t b) const { // both reached
    return enter_[number_[a]] <= enter_[number_[b]] && leave_[number_[b]] <= leave_[number_[a]];
  }

  // The construct in which each block is.
  void constructs() {
    std::vector<uint32_t> merged(blocks_.size(), none);
    for (uint32_t c = 0; c < constructs_.size(); ++c) {
      const Construct& found = constructs_[c];
      need(merged[found.merge] == none && found.merge != found.header && found.merge != found.proceed,
           "merges are shared");
      merged[found.merge] = c;
      if (!reached(found.header))
        continue;
      need(!reached(found.merge) || dominates(found.header, found.merge), "merges can be reached from elsewhere");
      need(found.proceed == none || !reached(found.proceed) || dominates(found.header, found.proceed),
           "continue targets can be reached from elsewhere");
    }
    in_.assign(blocks_.size(), none);
    for (const uint32_t b : order_) {
      if (b == 0)
        continue;
      const uint32_t above = order_[dominator_[number_[b]]];
      if (merged[b] != none && reached(constructs_[merged[b]].header))
        in_[b] = in_[constructs_[merged[b]].header];
      else
        in_[b] = blocks_[above].construct != none ? blocks_[above].construct : in_[above];
      proceed(b);
      if (blocks_[b].construct != none) {
        Construct& made = constructs_[blocks_[b].construct];
        made.outer = in_[b];
        made.depth = in_[b] == none ? 0 : constructs_[in_[b]].depth + 1;
        need(made.depth < deepest, "control flow is nested too deeply");
      }
    }
  }

  // A loop's continue target is in the loop, whatever ends before it.
  void proceed(uint32_t b) {
    if (continues_.empty()) {
      continues_.assign(blocks_.size(), none);
      for (uint32_t c = 0; c < constructs_.size(); ++c)
        if (constructs_[c].proceed != none && constructs_[c].proceed != constructs_[c].header) {
          need(continues_[constructs_[c].proceed] == none, "continue targets are shared");
          continues_[constructs_[c].proceed] = c;
        }
    }
    if (continues_[b] != none && reached(constructs_[continues_[b]].header))
      in_[b] = continues_[b];
  }

  // Where an edge leads: on, out of the construct, or back to a loop's header.
  void edges() {
    std::vector<uint32_t> back(blocks_.size());
    for (const uint32_t b : order_) {
      const bool heads = blocks_[b].construct != none;
      const uint32_t in = heads ? blocks_[b].construct : in_[b];
      // The innermost loop and switch around the edge.
      uint32_t loop = in, choice = in;
      while (loop != none && constructs_[loop].proceed == none)
        loop = constructs_[loop].outer;
      while (choice != none && !constructs_[choice].is_switch && constructs_[choice].proceed == none)
        choice = constructs_[choice].outer;
      size_t onward = 0;
      for (const uint32_t next : blocks_[b].next) {
        if (loop != none && next == constructs_[loop].header) {
          need(dominates(next, b), "control flow is not structured");
          ++back[next];
          continue;
        }
        need(number_[next] > number_[b], "control flow is not structured"); // a way back to what is no header
        const bool out = (in != none && next == constructs_[in].merge) ||
                         (loop != none && (next == constructs_[loop].merge || next == constructs_[loop].proceed)) ||
                         (choice != none && next == constructs_[choice].merge);
        need(out || in_[next] == in, "control flow is not structured");
        onward += !out;
      }
      const bool conditional = m_.instructions[blocks_[b].last].op == op_branch_conditional;
      need(!conditional || heads || onward <= 1 || blocks_[b].next[0] == blocks_[b].next[1],
           "control flow is not structured");
    }
    for (const Construct& found : constructs_)
      if (found.proceed != none && reached(found.header))
        need(back[found.header] <= 1, "loops have several ways back");
  }

  bool available(uint32_t id, uint32_t block) const {
    const Id& found = m_.ids[id];
    if (found.role != Role::value || found.block == none) // a constant, a variable of the module, or a parameter
      return found.role != Role::value || found.instruction < m_.functions.front().first || mine(found);
    if (!mine(found))
      return false;
    return !reached(block) || (reached(found.block) && dominates(found.block, block));
  }

  bool mine(const Id& id) const { return id.instruction > f_.first && id.instruction < f_.last; }

  void values() {
    for (uint32_t b = 0; b < blocks_.size(); ++b)
      for (uint32_t n = blocks_[b].first; n <= blocks_[b].last; ++n) {
        const Instruction& i = m_.instructions[n];
        if (i.op == op_phi)
          phi(i, b);
        else
          each_value(i, [&](uint32_t id) { need(available(id, b), "values are used where they are not defined"); });
      }
  }

  // Operands that are values: they were read once already, so their number is right.
  template <class F> void each_value(const Instruction& i, F&& f) const {
    const std::span<const uint32_t> given = m_.operands(i);
    size_t at = 0;
    for (const char* kind = i.form->operands; *kind != '\0' && at < given.size(); ++kind) {
      if (*kind == '?')
        continue;
      if (*kind == 'v') {
        f(given[at]);
      } else if (*kind == 'V') {
        for (; at < given.size(); ++at)
          f(given[at]);
        return;
      } else if (*kind == 'x' || *kind == 'N' || *kind == 'W') {
        return; // no values after these
      }
      ++at;
    }
  }

  void phi(const Instruction& i, uint32_t block) const {
    const std::span<const uint32_t> given = m_.operands(i).subspan(2);
    std::vector<uint32_t> from;
    for (size_t n = 0; n < given.size(); n += 2) {
      const uint32_t parent = block_of(given[n + 1]);
      need(available(given[n], parent), "values are used where they are not defined");
      from.push_back(parent);
    }
    if (!reached(block))
      return;
    std::vector<uint32_t> wanted = before_[block];
    std::erase_if(from, [&](uint32_t b) { return !reached(b); });
    std::ranges::sort(from);
    std::ranges::sort(wanted);
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    need(from == wanted, "phis do not name the blocks before them");
  }

  const Module& m_;
  const Function& f_;
  std::vector<Block> blocks_;
  std::vector<Construct> constructs_;
  std::vector<uint32_t> order_, number_;            // blocks in reverse postorder; the place of each there
  std::vector<std::vector<uint32_t>> before_;       // of each block
  std::vector<uint32_t> dominator_, enter_, leave_; // by place in the order
  std::vector<uint32_t> in_;                        // construct of each block
  std::vector<uint32_t> continues_;                 // loop of which a block is the continue target
};

} // namespace

void check_flow(const Module& module) {
  for (const Function& function : module.functions)
    Flow(module, function).run();
}

} // namespace lapilli::spirv

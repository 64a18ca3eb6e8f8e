// From text to a graph.
#pragma once

#include <string>
#include <vector>

#include "expression/graph.h"
#include "expression/lexer.h"

namespace pantile::expression {

// Whether a name has a meaning of its own, so that no tensor can have it.
bool is_word(const std::string& name);

// Throws Problem.
Function parse_text(ExpressionKind kind, const char* text, std::vector<Captured> captured);

}  // namespace pantile::expression
